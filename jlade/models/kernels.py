"""The kernels of an operation, and the choice between them and plain JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jlade.models import trial
from jlade.models.trial import Contest


class Kernels(NamedTuple):
    """An operation with kernels, each of which has the name of its platform.

    Attributes:
      subject: "attention", "experts" or "products".
      names: of the kernels.
      run: the operation, with the keyword argument `implementation`.
      prepare: returns the contest of a kernel with plain JAX, given both as programs, a device and a shape.
      obstacle: returns the reason why a kernel cannot run, None if it can, given its name, a device and a shape.
      may_skip: whether "plain" computes the shapes that a kernel does not take, and the kernel the others.
    """

    subject: str
    names: tuple[str, ...]
    run: Callable[..., jax.Array]
    prepare: Callable[[Callable[..., jax.Array], Callable[..., jax.Array], jax.Device, Any], Contest]
    obstacle: Callable[[str, jax.Device, Any], str | None]
    may_skip: bool = False

    @property
    def implementations(self) -> tuple[str, ...]:
        """The accepted names of implementations."""
        return "auto", "plain", *self.names

    def check(self, implementation: str) -> None:
        """Raises a ValueError if `implementation` is unknown."""
        if implementation not in self.implementations:
            names = ", ".join(map(repr, self.implementations))
            raise ValueError(f"{self.subject} must be one of {names}; got {implementation!r}")

    def resolve(
        self,
        implementation: str,
        device: jax.Device,
        shapes: Sequence[Any],
        may_run: bool = True,
        is_attached: bool = True,
    ) -> str:
        """Returns the implementation that runs on `device`: "plain" or the name of a kernel.

        "auto" gives the kernel of the device if it can run there and passes its trials, otherwise "plain"; see
        `jlade.models.trial`. Other implementations are not tried.

        Args:
          implementation: one of `implementations`.
          device: the device that holds the parameters.
          shapes: of the arrays there: one or more named tuples. The kernel has a trial with each that it takes.
          may_run: whether "auto" may run a kernel on `device` to try it; otherwise only a remembered verdict counts.
          is_attached: whether the device is there; otherwise "auto" is the kernel that can run, without a trial.

        Raises:
          ValueError: `implementation` is unknown, or names a kernel that cannot run on `device`.
        """
        self.check(implementation)
        name = device.platform if implementation == "auto" else implementation
        if name not in self.names:
            return "plain"
        obstacles = {shape: self.obstacle(name, device, shape) for shape in shapes}
        taken = [shape for shape, obstacle in obstacles.items() if obstacle is None]
        can_run = bool(taken) if self.may_skip else len(taken) == len(obstacles)
        if implementation != "auto":
            if not can_run:
                obstacle = next(filter(None, obstacles.values()))
                raise ValueError(f"{self.subject} {name!r} {obstacle}; choose 'auto' or 'plain'")
            return name
        kernel, plain = (functools.partial(self.run, implementation=each) for each in (name, "plain"))

        def passes(shape: Any) -> bool:
            contest = functools.partial(self.prepare, kernel, plain, device, shape)
            return trial.passes(self.subject, name, device, shape, contest, may_run)

        return name if can_run and (not is_attached or all(map(passes, taken))) else "plain"


def hopper_obstacle(device: jax.Device) -> str | None:
    """Returns the reason why kernels for Hopper GPUs cannot run on a device, None if they can."""
    if getattr(device, "compute_capability", None) != "9.0":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), and the device is {device.device_kind}"
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
    return None
