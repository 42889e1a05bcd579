"""Build hook: warmers/ travels in a wheel as neffcache/_warmers.

Not in an editable install: there it would be a copy in site-packages that no edit of warmers/ reaches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Warmers(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        warmers = Path(self.root) / "warmers"
        if not any(warmers.glob("*.toml")):
            raise FileNotFoundError("warmers/ holds no .toml file: this wheel would know no configuration")
        build_data["force_include"][str(warmers)] = "neffcache/_warmers"
