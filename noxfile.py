"""The tests that depend on the versions of Python, JAX and the other dependencies, on each of these versions.

    uvx nox                     # all sessions; uv brings the Pythons that are missing
    uvx nox -s "newest-3.13"    # one of them

`newest` has the newest versions that pyproject.toml accepts, `oldest` the oldest JAX, and `lowest` the oldest versions
of all dependencies. Python 3.11 has no newer JAX than the oldest one.
"""

import nox

nox.options.default_venv_backend = "uv"
CORE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "@tests/core.txt"]


def run(session: nox.Session, *options: str) -> None:
    """Installs jlade with its tests by these options of uv, and runs the core of the suite."""
    session.install("--editable", ".[test]", *options)
    # Nothing that an import gives a warning of may wait for the next version.
    session.run("python", "-W", "error", "-c", "import jlade, jlade.cli.commands, jlade.server.app; jlade.generate")
    session.run("python", "-m", "pytest", *CORE, *session.posargs, env={"PYTHONWARNINGS": "error::DeprecationWarning"})


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest versions."""
    run(session)


@nox.session(python=["3.12", "3.13"])
def oldest(session: nox.Session) -> None:
    """The oldest JAX, beside the newest of all else."""
    oldest = next(each for each in nox.project.load_toml()["project"]["dependencies"] if each.startswith("jax>="))
    session.log(oldest)
    run(session, oldest.replace(">=", "==").partition(",")[0])


@nox.session(python="3.12")
def lowest(session: nox.Session) -> None:
    """The oldest versions of all dependencies that pyproject.toml names."""
    run(session, "--resolution", "lowest-direct")
