import pytest

from knit.common.paths import load_path
from knit.common.pysource import find_source, missing_name
from knit.errors import ConfigError


def test_a_path_loads_what_it_names():
    import os.path

    assert load_path("os.path:join") is os.path.join
    assert load_path("collections:OrderedDict.fromkeys")("a") == {"a": None}


@pytest.mark.parametrize("path", ["os.path", "os.path:", ":join", "os path:join", "os.path:join()"])
def test_another_form_is_refused(path):
    with pytest.raises(ConfigError, match=r"package\.module:name"):
        load_path(path)


def test_a_missing_module_or_name_is_one_readable_line():
    with pytest.raises(ConfigError, match=r"^nowhere\.at:all: cannot import nowhere\.at \(ModuleNotFoundError"):
        load_path("nowhere.at:all")
    with pytest.raises(ConfigError, match=r"^os\.path:jion: module os\.path has no jion$"):
        load_path("os.path:jion")


def test_modules_in_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def length(sample): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    assert load_path("rewards_of_mine:length")(None) == 1.0


def test_source_is_looked_up_without_import(tmp_path, monkeypatch):
    package = tmp_path / "heavy_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "loss.py").write_text("import torch_of_tomorrow as t\nif t:\n    def mine(): ...\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_source("heavy_package.loss") == package / "loss.py"
    assert missing_name("heavy_package.loss:mine") is None
    assert missing_name("heavy_package.loss:limit") is None
    assert "has no yours" in missing_name("heavy_package.loss:yours")
    assert "there is no module heavy_package.lost" in missing_name("heavy_package.lost:mine")
    assert missing_name("heavy_package.loss") == "write it as package.module:name"
    (package / "broken.py").write_text("x = 1\ndef f(:\n")
    assert "broken.py, line 2" in missing_name("heavy_package.broken:f")
