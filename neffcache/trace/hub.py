"""What a configuration reads from Hugging Face: TorchTitan's `transformers_modeling_backend` builds the model that a
configuration file there describes, so its content is part of the workload.

`transformers` is asked in the way TorchTitan asks it (`PretrainedConfig.get_config_dict`): it looks in the cache of
this machine first, and takes a local folder for a name too.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffcache.errors import Unsupported
from neffcache.key.canonical import digest

FILE = "config.json"


def files(config: Any) -> list[str]:
    """Names of what a Trainer.Config reads, as "organisation/model/config.json". Nothing is read."""
    model = getattr(config, "hf_model", "")
    return [f"{model}/{FILE}"] if model else []


def contents(config: Any) -> dict[str, str]:
    """Name -> SHA-256 of what stands in the file: of its canonical JSON, without what transformers adds.

    A model whose repository brings code of its own (`auto_map`) is known by its commit besides. Raises Unsupported for
    a file that cannot be read, and for code that no commit names.
    """
    return {name: _content(config.hf_model, name) for name in files(config)}


def _content(model: str, name: str) -> str:
    try:
        transformers: Any = importlib.import_module("transformers")
        found, _ = transformers.PretrainedConfig.get_config_dict(model)
    except ImportError:
        return ""  # TorchTitan says that it is missing, and what needs it
    except OSError as fault:
        raise Unsupported(
            f"this configuration takes its shapes from {name} of Hugging Face, which cannot be read here",
            hint=f"hf download {model} {FILE}, or HF_HUB_CACHE=DIR that has it",
            details={"files": [name], "cause": str(fault)[:300]},
        ) from fault
    stands: Mapping[str, Any] = {key: value for key, value in found.items() if not key.startswith("_")}
    if not stands.get("auto_map"):
        return digest(stands)
    commit = _commit(model)
    # "other/repository--module.Class" is code of somewhere else, which this commit does not name.
    if not commit or "--" in json.dumps(stands["auto_map"]):
        raise Unsupported(
            f"{model} brings code of its own (auto_map in {FILE}), and nothing says which version of it",
            hint="name a model of Hugging Face whose code is in its own repository",
        )
    return digest({"file": stands, "commit": commit})


def _commit(model: str) -> str:
    """The commit that this machine's cache has of a repository, "" for a local folder."""
    cache: Any = importlib.import_module("huggingface_hub")
    try:
        path = cache.try_to_load_from_cache(model, FILE)
    except ValueError:
        return ""
    name = Path(path).parent.name if isinstance(path, str) else ""
    return name if re.fullmatch("[0-9a-f]{40}", name) else ""
