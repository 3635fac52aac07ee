"""What a service file may not say: each refusal is one line with the file, the key and what stands there, however odd it is."""

from __future__ import annotations

from dataclasses import fields

import pytest

from envs.scenario.scenario_error import ScenarioError
from runtime import setting_bounds
from runtime.gateway import settings as gateway_settings
from runtime.gateway.settings import GatewaySettings
from runtime.scheduling import control_settings, dispatch_settings
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.service_config import load_service

ODD = ["-1", ".nan", ".inf", "-.inf", "1e999", "1" + "0" * 400, '"x"', "[]", "{a: b}", "true", "~"]


def refused(folder, text: str) -> str:
    file = folder / "service.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as told:
        load_service(file)
    line = str(told.value)
    assert line.startswith(str(file)) and "\n" not in line and len(line) < 400 + len(str(file)), line
    return line


def numbers(kind) -> list[str]:
    default = kind()
    return [field.name for field in fields(kind) if type(getattr(default, field.name)) in (int, float)]


@pytest.mark.parametrize(
    ("key", "kind", "bounds"),
    [
        ("dispatch", DispatchSettings, dispatch_settings.BOUNDS),
        ("control", ControlSettings, control_settings.BOUNDS),
        ("gateway", GatewaySettings, gateway_settings.BOUNDS),
    ],
)
def test_every_number_has_bounds(tmp_path, key, kind, bounds):
    assert set(numbers(kind)) == set(bounds)
    for name in numbers(kind):
        for value in ODD:
            assert name in refused(tmp_path, f"{{cluster: unlike-3, {key}: {{{name}: {value}}}}}")
        if isinstance(getattr(kind(), name), int):
            assert "whole" in refused(tmp_path, f"{{cluster: unlike-3, {key}: {{{name}: 1.5}}}}")


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{{cluster: {LONG}}}", "name too long"),
        (f"{{cluster: unlike-3, bundle: {LONG}}}", "name too long"),
        (f"{{cluster: unlike-3, model: {{path: {LONG}}}}}", "name too long"),
        ('{cluster: unlike-3, records: {dir: "a\\0b"}}', "NUL"),
        ('{cluster: unlike-3, model: {name: "\\ud800"}}', "half a character"),
        ('{cluster: unlike-3, host: ""}', "host"),  # which would be every address of the machine
        ("{cluster: unlike-3, port: 65536}", "port"),
        ("{cluster: unlike-3, port: true}", "true is no number"),
        ("{cluster: unlike-3, model: {path: smollm2}, groups: {pair: {kind: torch_tp, ranks: [{device: nope}, {}]}}}", "device"),
        ('{cluster: unlike-3, api_keys_env: ""}', "api_keys_env"),  # which would be no key at all
        ("{cluster: unlike-3, gateway: {api_keys: [1]}}", "api_keys"),
        ("{cluster: unlike-3, scheduler: {heuristic: net_utilty}}", 'did you mean "net_utility"'),
        (f"{{cluster: unlike-3, scheduler: {{heuristic: {LONG}}}}}", "unknown"),
        ("{cluster: unlike-3, dispatch: {degrade_max_tokens: {batch: 99999999999999999999}}}", "degrade_max_tokens.batch"),
        ("{cluster: unlike-3, groups: {pair: {url: 'http://x'}}}", "only for kind openai_http"),
        ("{cluster: unlike-3, groups: {pair: {kind: openai_http, url: 'http://x', api_key_env: BALLAST_NO_SUCH_KEY}}}", "api_key_env"),
        *(
            (f'{{cluster: unlike-3, groups: {{pair: {{kind: openai_http, url: "{url}"}}}}}}', "groups.pair.url")
            for url in ("http://", "http://:80", "http://h:99999", "http://h:x", "http://[::1", "http://h/a b", "http://h\\r\\nx: y", "http://é",
                        "http://h?x=1", "h:80", "")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path, text, said):
    assert said.lower() in refused(tmp_path, text).lower()


def test_a_key_that_would_begin_another_header_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BALLAST_ODD_KEY", "sk-1\r\nx-other: 2")
    refused(tmp_path, "{cluster: unlike-3, groups: {pair: {kind: openai_http, url: 'http://x', api_key_env: BALLAST_ODD_KEY}}}")
    refused(tmp_path, "{cluster: unlike-3, api_keys_env: BALLAST_ODD_KEY}")


def test_a_bound_holds_for_programs_too():
    with pytest.raises(ValueError, match="hold_max_s=nan must be within"):
        DispatchSettings(hold_max_s=float("nan"))
    setting_bounds.check_bounds(DispatchSettings(), dispatch_settings.BOUNDS)
