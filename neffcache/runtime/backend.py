"""Entry point `torch_dynamo_backends`: `torch.compile(backend="neffcache")`, for programs that ask by name.

Under `neffcache run` it serves from the view like the replaced Inductor does; elsewhere it says what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from neffcache import variables
from neffcache.errors import Usage


def neffcache(gm: Any, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Any:
    from neffcache.runtime.doors import current_backend

    serve = current_backend()
    if serve is None:
        raise Usage(
            "the backend neffcache serves a manifest, and this process was given none",
            hint="start the program with: neffcache run CONFIG -- COMMAND",
            details={"variable": variables.MANIFEST, "set": variables.MANIFEST in os.environ},
        )
    return serve(gm, example_inputs, options=options)
