"""A cache of the Hugging Face Hub in a directory."""

from tests.conversion.hf_files import DEMO


def in_hub(tmp_path, monkeypatch):
    """Puts the demo checkpoint into a cache of huggingface_hub, as a download would."""
    repository = tmp_path / "hub" / "models--someone--demo"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).symlink_to(DEMO, target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
