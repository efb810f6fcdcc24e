"""What is fetched from the Hub, and in which order: huggingface_hub itself, with a server on this machine."""

import hashlib
import http.server
import json
import shutil
import threading
import urllib.parse

import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade import cli
from jlade.cli import arguments, generate
from jlade.conversion import load_gguf, location
from tests.conversion.gguf_files import write
from tests.conversion.hf_files import DEMO, assert_equal

NAME, COMMIT = "someone/model", "c" * 40
COPIES = [  # what many repositories have beside a checkpoint
    "README.md",
    "modeling_custom.py",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/params.json",
    "original/tokenizer.model",
    "original/model.safetensors",
    "onnx/config.json",
    "model-q4.gguf",
]
SETTINGS = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


class Hub:
    """A repository of the Hub.

    Attributes:
      directory: its files.
      fetched: names of the files that clients read, in order.
      revisions: branches, tags and commits of which clients asked for files.
      facts: what the Hub says of the repository besides the names of its files.
      broken: files whose content ends, with the connection, after some bytes.
    """

    def __init__(self, directory):
        self.directory, self.fetched, self.revisions, self.facts = directory, [], set(), {}
        self.broken = set()

    def answer(self, path, is_read):
        """Returns the content at a path of the server, and its headers; None where there is nothing."""
        path = urllib.parse.unquote(path.partition("?")[0])
        files = {file.relative_to(self.directory).as_posix(): file for file in self.directory.rglob("*.*")}
        if path.startswith(f"/api/models/{NAME}/revision/"):
            siblings = [{"rfilename": name} for name in files]
            return json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings} | self.facts).encode(), {}
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in files]
            return json.dumps(tree).encode(), {}
        revision, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
        if path.startswith(f"/{NAME}/resolve/"):
            self.revisions.add(revision)
        if name not in files:
            return None
        if is_read:
            self.fetched.append(name)
        content = files[name].read_bytes()
        return content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository, empty but for copies of a checkpoint that jlade does not read."""
    hub = Hub(tmp_path / "repository")
    for name in COPIES:
        file = hub.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = hub.answer(self.path, is_read=self.command == "GET")
            content, headers = found or (b"", {"X-Error-Code": "EntryNotFound"})
            self.send_response(200 if found else 404)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                is_broken = self.path.rpartition("/")[2] in hub.broken
                self.wfile.write(content[:10] if is_broken else content)

        do_HEAD = do_GET  # noqa: N815, which http.server looks for

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in ("constants", "file_download"):  # older versions have a copy in the latter
        name = f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(name, template, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def add_demo(hub, *names, **changes):
    """Adds files of the demo model, with changes to its config.json."""
    for name in names:
        shutil.copy(DEMO / name, hub.directory / name)
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (hub.directory / "config.json").write_text(json.dumps(config))


def assert_fetched(hub, *groups):
    """Asserts that the files of each group were fetched after those of the group before, and nothing else."""
    begin = 0
    for group in groups:
        assert sorted(hub.fetched[begin : begin + len(group)]) == sorted(group)
        begin += len(group)
    assert hub.fetched[begin:] == []


def test_configuration_comes_first_and_weights_last(hub, demo, monkeypatch):
    add_demo(hub, *SETTINGS, "model.safetensors")
    params, tokenizer = jlade.load(NAME, "float32")
    assert_fetched(hub, ["config.json"], SETTINGS, ["model.safetensors"])
    assert_equal(params, demo[0])
    assert tokenizer.to_str() == demo[1].to_str()
    jlade.load(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_equal(jlade.load(NAME, "float32")[0], demo[0])
    assert_fetched(hub, ["config.json"], SETTINGS, ["model.safetensors"])


def test_the_weights_are_the_files_that_the_index_names(hub, demo, tmp_path):
    tensors, names = load_file(DEMO / "model.safetensors"), ["first.safetensors", "second.safetensors"]
    weight_map = {tensor: names[i % 2] for i, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}
        save_file(part, hub.directory / name)
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    add_demo(hub)
    assert cli.main(["convert", NAME, str(tmp_path / "new"), "--to", "hf"]) == 0
    assert_fetched(hub, ["config.json"], ["model.safetensors.index.json"], names)
    assert_equal(jlade.load(tmp_path / "new", "float32")[0], demo[0])


def test_a_whole_file_beside_an_index_is_fetched_alone(hub):
    add_demo(hub, "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "consolidated.safetensors"}}
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    location.find(NAME, weights=True)
    assert_fetched(hub, ["config.json"], ["model.safetensors.index.json"], ["model.safetensors"])


@pytest.mark.parametrize("weight_map", [{"a": "../config.json", "b": [], "c": "*"}, [], None])
def test_an_index_names_files_alone(hub, weight_map):
    add_demo(hub)
    (hub.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: weight_map"):
        jlade.load(NAME)
    assert_fetched(hub, ["config.json"], ["model.safetensors.index.json"])


def test_settings_need_no_weights(hub):
    add_demo(hub, *SETTINGS, "model.safetensors")
    (hub.directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    assert jlade.load_sampling(NAME) == jlade.SamplingConfig(temperature=0.6, top_k=50)
    assert_fetched(hub, ["config.json"], SETTINGS)


def test_a_plan_and_an_inspection_need_no_weights(hub, capsys):
    add_demo(hub, *SETTINGS, "model.safetensors")
    assert cli.main(["plan", NAME, "--device", "rtx4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == jlade.plan(DEMO, "rtx4090").facts()
    facts = []
    for words in ([NAME], [str(DEMO)]):
        assert cli.main(["inspect", *words, "--json"]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    assert_fetched(hub, ["config.json"], SETTINGS)
    different = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    assert different == {"path", "files"}
    assert facts[0]["files"] == {"count": 0, "bytes": 0, "tensor_bytes": {}}
    assert cli.main(["inspect", NAME]) == 0
    assert "not fetched" in capsys.readouterr().out
    jlade.load(NAME)
    assert cli.main(["inspect", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == facts[1]["files"]


def test_commands_read_the_revision_alone(hub, tmp_path):
    add_demo(hub, *SETTINGS, "model.safetensors")
    given = generate.parser().parse_args(["--model", NAME, "--revision", "v1"])
    for read in (arguments.request, arguments.find, arguments.load):
        read(given)
    assert cli.main(["convert", NAME, str(tmp_path / "new"), "--revision", "v1"]) == 0
    assert hub.revisions == {"v1", COMMIT}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "hqq"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_before_anything_else_is_fetched(hub, changes, message):
    add_demo(hub, *SETTINGS, "model.safetensors", **changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        jlade.load(NAME)
    assert_fetched(hub, ["config.json"])


def test_weights_in_other_formats_are_refused(hub):
    add_demo(hub, *SETTINGS)
    message = (
        r"someone/model on the Hub has neither model\.safetensors nor .*index\.json\. transformers' `save_pretrained`"
    )
    with pytest.raises(ValueError, match=rf"{message} .*`hf download someone/model FILE`, which prints its path"):
        jlade.load(NAME)
    assert_fetched(hub, ["config.json"], SETTINGS)


def test_unknown_keys_are_named_once(hub):
    add_demo(hub, "model.safetensors", unheard_of=0)
    with pytest.warns(UserWarning, match="unheard_of") as caught:
        jlade.load(NAME)
    assert len(caught) == 1


@pytest.mark.parametrize("split", [None, {"split_max_tensors": 8}])
def test_a_repository_with_one_gguf_model(hub, split, tmp_path, monkeypatch):
    (hub.directory / "model-q4.gguf").unlink()
    expected = load_gguf(write(tmp_path / "model.gguf"))
    write(hub.directory / "model.gguf", split=split)
    hub.facts = {"gguf": {"architecture": "llama"}}
    assert_equal(jlade.load(NAME)[0], expected)
    files = [file.name for file in hub.directory.glob("*.gguf")]
    assert len(files) == (3 if split else 1)
    assert_fetched(hub, files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_equal(jlade.load(NAME)[0], expected)


def test_of_several_gguf_models_one_must_be_named(hub):
    (hub.directory / "model-q8.gguf").write_text("{}")
    message = r"someone/model on the Hub has no config\.json and 2 GGUF models: model-q4\.gguf, model-q8\.gguf\. .*"
    with pytest.raises(ValueError, match=rf"{message}`hf download someone/model FILE`"):
        jlade.load(NAME)
    for file in hub.directory.glob("*.gguf"):
        file.unlink()
    with pytest.raises(ValueError, match=r"someone/model on the Hub has no config\.json and no GGUF file"):
        jlade.load(NAME)
    assert_fetched(hub)


def test_a_gguf_model_that_is_not_supported_is_not_fetched(hub):
    hub.facts = {"gguf": {"architecture": "mamba"}}
    with pytest.raises(ValueError, match=r"someone/model: general\.architecture is 'mamba'; supported are llama"):
        jlade.load(NAME)
    assert_fetched(hub)


def test_an_adapter_comes_with_its_weights(hub):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (hub.directory / name).write_text(name)
    directory = location.find(NAME, weights=True)
    assert_fetched(hub, ["adapter_config.json"], ["adapter_model.safetensors"])
    assert sorted(file.name for file in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_connection_that_breaks_is_an_error_in_words(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before each new trial
    add_demo(hub, *SETTINGS)
    hub.broken.add("config.json")
    with pytest.raises(ValueError, match=f"got '{NAME}'.* The Hub reports: "):
        jlade.load(NAME)
    assert set(hub.fetched) == {"config.json"}
