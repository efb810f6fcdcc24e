import json

import jlade
from jlade import cli


def test_a_prior_is_learned_from_files_and_drafts(demo, tmp_path, capsys):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "a.py").write_text("import os\n")
    (tmp_path / "texts" / "more" / "b.py").write_text("def read(path):\n    return path\n")
    file = tmp_path / "prior"
    assert cli.main(["prior", "--texts", str(tmp_path / "texts"), "--output", str(file)]) == 0
    prior = jlade.load_prior(file)
    assert capsys.readouterr().out == f"{file}: {prior}\n"
    texts = [each.read_text() for each in ((tmp_path / "texts" / "a.py"), (tmp_path / "texts" / "more" / "b.py"))]
    expected = jlade.prior(demo[0], texts).table
    assert prior.table.pairs.tolist() == expected.pairs.tolist()
    assert cli.main(["def f(", "--prior", str(file), "--lookahead", "tree=7", "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plain"]["identical"]
