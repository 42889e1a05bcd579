"""What a configuration reads from Hugging Face counts by its content. A stub stands in for transformers, which is an
extra: it reads the folder that it is given, as `PretrainedConfig.get_config_dict` does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from neffcache.errors import Unsupported
from neffcache.trace import hub


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    commit = ["1" * 40]

    class PretrainedConfig:
        @staticmethod
        def get_config_dict(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
            try:
                found = json.loads((Path(name) / "config.json").read_text())
            except FileNotFoundError as fault:
                raise OSError("We couldn't connect to 'https://huggingface.co' to load the files") from fault
            return {**found, "_name_or_path": name}, {}

    stub = ModuleType("transformers")
    stub.PretrainedConfig = PretrainedConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", stub)
    monkeypatch.setattr(hub, "_commit", lambda _: commit[0])

    def write(**values: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        (content,) = hub.contents(SimpleNamespace(hf_model=str(tmp_path))).values()
        return content

    write.commit = commit  # type: ignore[attr-defined]
    return write


def test_another_content_is_another_job_and_another_layout_is_not(model: Any, tmp_path: Path) -> None:
    first = model(hidden_size=64, num_hidden_layers=2)
    assert model(num_hidden_layers=2, hidden_size=64) == first
    assert model(hidden_size=64, num_hidden_layers=3) != first
    assert hub.files(SimpleNamespace(hf_model="org/model")) == ["org/model/config.json"]


def test_a_commit_counts_where_the_repository_has_code(model: Any) -> None:
    code = {"auto_map": {"AutoModel": "modeling.Model", "AutoTokenizer": [None, "tokenization.Tokenizer"]}}
    plain, coded = model(hidden_size=64), model(hidden_size=64, **code)
    model.commit[0] = "2" * 40
    assert model(hidden_size=64) == plain
    assert model(hidden_size=64, **code) != coded


def test_a_map_of_another_form_ends_in_no_traceback(model: Any) -> None:
    assert model(auto_map=["modeling.Model"]) != model(auto_map="modeling.Model")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_code_that_no_commit_names_is_refused(model: Any, elsewhere: bool) -> None:
    if not elsewhere:
        model.commit[0] = ""
    with pytest.raises(Unsupported, match="brings code of its own"):
        model(auto_map={"AutoModel": ["other/place--modeling.Model" if elsewhere else "modeling.Model"]})


def test_the_commit_is_that_of_this_machine_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("huggingface_hub")
    find = cache.try_to_load_from_cache
    monkeypatch.setattr(cache, "try_to_load_from_cache", lambda model, file: find(model, file, cache_dir=tmp_path))
    for commit, found in (("1" * 40, "1" * 40), ("by-hand", "")):
        place = tmp_path / "models--org--model"
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "config.json").write_text("{}")
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        assert hub._commit("org/model") == found
    assert hub._commit("org/absent") == hub._commit(str(tmp_path)) == ""


def test_a_file_that_cannot_be_had_is_named(model: Any) -> None:
    with pytest.raises(Unsupported, match=r"takes its shapes from org/model/config\.json of Hugging Face") as caught:
        hub.contents(SimpleNamespace(hf_model="org/model"))
    assert caught.value.hint.startswith("hf download org/model config.json")


def test_a_configuration_without_one_reads_nothing() -> None:
    assert hub.contents(SimpleNamespace()) == hub.contents(SimpleNamespace(hf_model="")) == {}


def test_the_content_is_in_the_workload(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan")
    from neffcache.key.workload import workload_component
    from neffcache.trace import document, titan

    config = titan.load_config(["--module", "llama3", "--config", "llama3_debugmodel"])
    assert "files" not in document.workload_document(config, {})
    monkeypatch.setattr(hub, "contents", lambda _: {"org/model/config.json": "a" * 64})
    assert workload_component(document.workload_document(config, {}))["files"] == {"org/model/config.json": "a" * 64}
