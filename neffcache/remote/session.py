"""A botocore session for short commands: what botocore does at its start and this package never asks for is left out.

Public parts of botocore only: components of a session, and classes that are meant to be replaced. `direct` has the one
exception.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from typing import Any

import botocore.loaders
import botocore.parsers
import botocore.session
import msgspec


class ModelFiles(botocore.loaders.JSONFileLoader):  # type: ignore[misc]
    """botocore's files, decoded by msgspec: in a third of the time, which a short command waits for."""

    def load_file(self, file_path: str) -> Any:
        """What is in the file of that path without its ending, None when there is none."""
        for ending, unpack in ((".json", bytes), (".json.gz", gzip.decompress)):
            try:
                with open(file_path + ending, "rb") as file:
                    return msgspec.json.decode(unpack(file.read()))
            except FileNotFoundError:
                continue
        return None


class _Loader(botocore.loaders.Loader):  # type: ignore[misc]
    """botocore's loader, which goes through the folders of all services to see that one exists; not for these."""

    known = ("s3", "sts", "sso", "sso-oidc")
    asked = ""

    def load_service_model(self, service_name: str, type_name: str, api_version: str | None = None) -> Any:
        self.asked = service_name
        return super().load_service_model(service_name, type_name, api_version)

    def list_available_services(self, type_name: str) -> list[str]:
        found: list[str] = list(self.known) if self.asked in self.known else super().list_available_services(type_name)
        return found


def quick_session() -> Any:
    """A session as botocore makes one, with what is said above."""
    session = botocore.session.get_session()
    if not session.get_config_variable("data_path"):  # models of the user's own are botocore's business
        session.register_component("data_loader", _Loader(file_loader=ModelFiles()))
    return session


@contextlib.contextmanager
def times_as_text(session: Any) -> Iterator[None]:
    """A client that is made inside does not parse times, which nobody asks for here: a tenth of a request's cost.

    It keeps a factory of its own, which it asks at each request: what asks for credentials in the same session does
    need times.
    """
    usual = session.get_component("response_parser_factory")
    parsers = botocore.parsers.ResponseParserFactory()
    parsers.set_parser_defaults(timestamp_parser=str)
    session.register_component("response_parser_factory", parsers)
    try:
        yield
    finally:
        session.register_component("response_parser_factory", usual)
