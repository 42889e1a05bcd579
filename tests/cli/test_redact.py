"""Redaction: what a machine is known to hold never passes, and what looks like a secret does not either."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from neffcache.flows.redact import REMOVED, Redactor, is_secret_name

pytestmark = pytest.mark.fast

# Made up, and put together here so that no scanner of repositories takes them for real.
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{'MIIEowIBAAKCAQEA7bq0fX' * 20}\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "AWS key id": "AKIA" + "IOSFODNN7EXAMPLE",
    "temporary AWS key id": "ASIA" + "Y34FZKBOKMUTVV7A",
    "AWS secret key": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
    "session token": "IQoJb3JpZ2luX2VjEJr" + "//////////wEaCXVzLWVhc3QtMSJHMEUCIQDn7Zx0fakefake",
    "Hugging Face token": "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "GitHub token": "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9",
    "Weights and Biases key": "0123456789abcdef0123456789abcdef01234567",
}


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("around", ["{}", "x {} y", "value={}", '{{"a": "{}"}}', "[{}]", "'{}'", "got {}.", "{}\n"])
def test_a_secret_is_known_by_its_shape(kind: str, around: str) -> None:
    assert SECRETS[kind] not in Redactor().text(around.format(SECRETS[kind]))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc123def", "abc123def"),
        ('{"authorization": "Basic dXNlcjpw"}', "dXNlcjpw"),
        ("-H 'X-Api-Key: s3cr3t'", "s3cr3t"),
        ("https://user:pa/ss@w0rd@minio.example:9000/b", "pa/ss@w0rd"),
        ("s3 at http://minio:hunter22@127.0.0.1:9000", "hunter22"),
        (r"http:\/\/minio:hunter22@127.0.0.1:9000", "hunter22"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=0f0f0f0f&X-Amz-Credential=me", "0f0f0f0f"),
        ("https://acc.blob.core.windows.net/c?sv=2022&sig=abc%2Fdef", "abc%2Fdef"),
        ("password = correct horse battery", "horse"),
        ('DB_PASSWORD="two words"', "two words"),
        ("export WANDB_API_KEY=abc", "=abc"),
        ("aws_secret_access_key : short", "short"),
        ('{"client_secret": "x y z"}', "x y z"),
        (json.dumps({"log": json.dumps({"token": "in a string"})}), "in a string"),
        ("login --password hunter22 --user me", "hunter22"),
        ("curl --api-key k-123 x", "k-123"),
        (PEM, "MIIEow"),
        (PEM.replace("\n", "\\n"), "MIIEow"),
        (PEM[:-60], "MIIEow"),
        ("[... left out ...]" + PEM[200:], "MIIEow"),
        ("arn:aws:iam::123456789012:role/x", "123456789012"),
        ("mail jane.doe@example.com", "jane.doe"),
        ("/home/janedoe/cache", "janedoe"),
        ("ip-10-0-3-17.ec2.internal went away", "10-0-3-17"),
    ],
)
def test_a_secret_is_known_by_where_it_stands(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "manifest 42cc38b4441a0ff9435aa60c579fdfa73f00637b76642c8a70780e29bc71d933",
        "job key a879c9074774d85154e9c88bba2f1d44 of llama3_debugmodel",
        "neuronx-cc 2.33.1.0+5f1ab000, torch 2.14.1+cpu",
        "s3://bucket/team/prefix as of NEFFCACHE_REMOTE",
        "/opt/aws/neuron/lib/libnrt.so.1: cannot open shared object file",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        "ERROR NCC_EXTP004: the graph has 6000000 instructions",
        "MODULE_13027587366239839853+a9d440f5/model.neff",
        "2026-01-02T03:04:05+00:00 compiled in 12.5 s",
    ],
)
def test_what_a_thread_needs_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("piece", ["a", "A1b", "a-", "a.b@", "://", "password", "x=", '"', "\\\\"])
def test_a_log_of_one_endless_word_is_no_trap(piece: str) -> None:
    assert Redactor().text(piece * (20_000 // len(piece))) is not None


def test_fields_of_json_go_by_name_and_ours_stay() -> None:
    shown = Redactor().json(
        {"cache_key": "a" * 32, "token": "short", "nested": [{"password": 5, "name": "x"}], "session": None}
    )
    assert shown == {
        "cache_key": "a" * 32, "token": REMOVED, "nested": [{"password": REMOVED, "name": "x"}], "session": None,
    }  # fmt: skip


def test_a_home_directory_with_a_random_name_is_still_the_home_directory() -> None:
    redactor = Redactor.of_host({"HOME": "/scratch/tmp.POMCj7SV6v/Qz81bK2xR9/home"})
    assert redactor.text("PATH=/scratch/tmp.POMCj7SV6v/Qz81bK2xR9/home/bin:/usr/bin") == "PATH=~/bin:/usr/bin"


def test_this_machine_s_own_secrets_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-17.cluster.local")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_secret_access_key = plain words\n")
    (tmp_path / ".netrc").write_text("machine x login me password in the netrc\n")
    home = str(tmp_path)
    redactor = Redactor.of_host(
        {"HOME": home, "USER": "janedoe", "MY_TOKEN": "simple word", "URL": "http://a:p%40ss12@h/"}
    )
    text = f"{home}/x of janedoe at trainer-17: simple word, plain words, p%40ss12, p@ss12, simple%20word"
    shown = redactor.text(text)
    assert shown.startswith("~/x of <user> at <host>: ")
    for gone in (home, "janedoe", "trainer-17", "simple", "plain words", "ss12"):
        assert gone not in shown


word = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=6, max_size=60)


def test_blanks_are_no_secret() -> None:
    redactor = Redactor()
    redactor.learn(" " * 12)
    assert redactor.text("a" + " " * 20 + "b") == "a" + " " * 20 + "b"


@settings(max_examples=50)
@given(before=st.text(max_size=40), secret=word, after=st.text(max_size=40))
@example(before="", secret="00000\xa0", after="")
def test_a_known_value_never_passes(before: str, secret: str, after: str) -> None:
    assume(not any(secret in instead for instead in (REMOVED, "<private key>", "<account>", "<AWS key id>", "<email>")))
    redactor = Redactor()
    redactor.learn(secret)
    for written in (
        secret, quote(secret, safe=""), json.dumps(secret)[1:-1], base64.b64encode(secret.encode()).decode()
    ):  # fmt: skip
        shown = redactor.text(f"{before}{written}{after}")
        assert secret not in shown
        assert not redactor.leaks(shown)


@settings(max_examples=50)
@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing_that_once_did_not_hide(text: str) -> None:
    redactor = Redactor()
    redactor.learn("a known secret")
    once = redactor.text(f"{text}a known secret{text}")
    assert "a known secret" not in redactor.text(once)


names = st.sampled_from(["password", "API_TOKEN", "aws_secret_access_key", "client_secret", "x-auth-token", "HF_TOKEN"])
value = st.text(st.characters(categories=["L", "N"]), min_size=8, max_size=40)


@settings(max_examples=50)
@given(name=names, secret=value, form=st.sampled_from(["{}={}", "{}: {}", '"{}": "{}"', "{} = '{}'", "export {}={}"]))
def test_what_is_assigned_to_a_secret_name_never_passes(name: str, secret: str, form: str) -> None:
    assume(secret.lower() not in name.lower() and secret not in REMOVED)
    assert secret not in Redactor().text(form.format(name, secret))


@pytest.mark.parametrize("name", ["cache_key", "compile_key", "config", "manifest", "lnc", "conditional_writes"])
def test_names_of_ours_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)
