"""The admin endpoints over a real service of emulated groups and one foreign server that is not there."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from envs.domain.commands import Command, CommandKind
from runtime.gateway.app import make_app
from runtime.gateway.settings import GatewaySettings
from runtime.service import Service
from runtime.service_admin import ServiceAdmin
from runtime.service_config import load_service
from tests.conftest import GUARD_S

LOCAL, ELSEWHERE = ("127.0.0.1", 40000), ("10.1.2.3", 40000)
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def served(folder: Path, keys: tuple[str, ...] = ()):
    """(client of some address -> httpx client, service)"""
    file = folder / "service.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "cluster": "mixed-8",
                "groups": {"h100": {"kind": "openai_http", "url": "http://127.0.0.1:9"}},
                "control": {"is_on": False, "drain_patience_s": 0.1},
            }
        )
    )
    config = load_service(file)
    service = Service(replace(config, gateway=GatewaySettings(api_keys=keys)))
    app = make_app(service, service.config.gateway, administered=ServiceAdmin(service, "1"))
    await service.start()

    def client(address=LOCAL, **more) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=address), base_url="http://localhost", **more)

    try:
        yield client, service
    finally:
        await service.close()


def play(folder: Path, body, **more) -> None:
    async def run() -> None:
        async with served(folder, **more) as (client, service):
            await body(client, service)

    asyncio.run(run())


def ask(max_tokens: int = 60) -> dict:
    return {"model": "Llama-3.1-8B", "prompt": "the sky is", "max_tokens": max_tokens, "ignore_eos": True}


def check_finite(value) -> None:
    if isinstance(value, float):
        assert math.isfinite(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_finite(inner)


GROUP_KEYS = {
    "name", "kind", "is_emulation", "state", "detail", "accepts", "can", "cannot", "running", "waiting", "running_limit", "queue_limit",
    "attempts", "kv", "report_age_s", "step_s", "step_ratio", "pause_left_s", "effective_compute_share", "memory_bytes_per_s", "plan",
    "move_debt_s", "breaker", "ranks",
}  # fmt: skip
TOP_KEYS = {
    "at_s", "service", "groups", "moves", "moves_under_way", "decisions", "class_breakers", "overload", "deciders", "control", "counters",
}  # fmt: skip


def test_the_state_says_what_the_docs_promise(tmp_path, kernels):
    """Strict JSON; every documented key is there; a busy group computes and reads memory; the decision that was made is told with its
    numbers."""

    async def body(client, service) -> None:
        async with client() as http:
            empty = (await http.get("/admin/state")).json()
            assert set(empty) == TOP_KEYS and all(set(group) == GROUP_KEYS for group in empty["groups"])
            answers = [asyncio.create_task(http.post("/v1/completions", json=ask(4000))) for _ in range(6)]  # until we have seen them
            async with asyncio.timeout(GUARD_S):
                while True:
                    text = (await http.get("/admin/state")).text
                    state = json.loads(text, parse_constant=lambda name: pytest.fail(name))
                    check_finite(state)
                    busy = max(state["groups"], key=lambda group: group["running"])
                    shares = busy["ranks"][0]["compute_share"], busy["ranks"][0]["memory_stall_share"]
                    if state["service"]["in_flight"] == 6 and busy["running"] and all(shares) and sum(shares) > 0.3:
                        break
                    await asyncio.sleep(0.1)
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
        assert busy["kv"]["tokens_used"] > 0
        rank = busy["ranks"][0]  # of an emulated step all but communication and host time is one of the two
        assert 0.3 < rank["compute_share"] + rank["memory_stall_share"] <= 1.05
        assert busy["effective_compute_share"] == max(rank["compute_share"] for rank in busy["ranks"])
        assert busy["memory_bytes_per_s"] > 1e9
        assert sum(busy["plan"]["shares"]) == pytest.approx(1.0)
        decision = state["decisions"][0]
        assert (decision["decision"], decision["source"], decision["cause"]) == ("route", "heuristic", "no_policy")
        chosen = decision["candidates"][decision["chosen"]]
        assert chosen["kind"] == "route" and chosen["is_allowed"] and chosen["ttft_s"] > 0 and chosen["net_utility"] <= 2.0
        assert state["deciders"]["route"]["counts"][0]["count"] == 6
        foreign = next(group for group in state["groups"] if group["name"] == "h100")
        assert foreign["kind"] == "openai_http" and foreign["can"] == ["requeue"] and foreign["plan"] is None
        assert foreign["breaker"]["state"] == "forced_open" and "foreign" in foreign["cannot"]["set_split"]
        assert len(state["class_breakers"]) == 3

    play(tmp_path, body)


def test_drain_and_undrain(tmp_path, kernels):
    """A drained group says so, its calls end elsewhere without an error, and it serves again when told to."""

    async def body(client, service) -> None:
        async with client() as http:
            answers = [asyncio.create_task(http.post("/v1/completions", json=ask())) for _ in range(8)]
            await asyncio.sleep(0.3)
            said = await http.post("/admin/groups/a100-pair/drain", headers=JSON)
            assert (said.status_code, said.json()) == (200, {"group": "a100-pair", "state": "draining"})
            for answer in answers:
                assert (await answer).json()["usage"]["completion_tokens"] == 60
            async with asyncio.timeout(GUARD_S):
                while (group := (await http.get("/admin/state")).json()["groups"][0])["state"] != "drained":
                    await asyncio.sleep(0.05)
            assert (group["accepts"], group["running"]) == (False, 0)
            said = await http.post("/admin/groups/a100-pair/undrain", headers=JSON)
            assert said.json()["state"] == "serving"
            state = (await http.get("/admin/state")).json()
            assert state["groups"][0]["state"] == "serving" and state["groups"][0]["accepts"]
            again = await http.post("/admin/groups/a100-pair/undrain", headers=JSON)
            assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
            assert state["moves"][0]["detail"] == "drained, not parked"

    play(tmp_path, body)


def test_resplit(tmp_path, kernels):
    """By shares and by a corner; the plan in the answer is the one in the state; what cannot be is refused by name."""

    async def body(client, service) -> None:
        async with client() as http:

            async def order(name: str, **body):
                return await http.post(f"/admin/groups/{name}/resplit", json=body)

            said = await order("a100-pair", shares=[3, 1])
            assert said.status_code == 200, said.text
            plan = said.json()["plan"]
            assert plan["query_heads"][0] == 3 * plan["query_heads"][1] and plan["corner"] is None and said.json()["paused_s"] >= 0.0
            assert (await order("a100-pair", corner="even")).json()["plan"]["corner"] == "even"
            state = (await http.get("/admin/state")).json()
            assert state["groups"][0]["plan"]["query_heads"] == [16, 16]
            assert [move["detail"] for move in state["moves"]] == ["even", "query heads [24, 8]"]
            assert state["moves"][0]["source"] == "operator" and state["moves"][0]["outcome"] == "done"
            for name, body, status, code in (
                ("nobody", {"corner": "even"}, 404, "unknown_group"),
                ("h100", {"corner": "even"}, 422, "not_possible"),
                ("a100-pair", {"corner": "round"}, 400, None),
                ("a100-pair", {}, 400, None),
                ("a100-pair", {"corner": "even", "shares": [1, 1]}, 400, None),
                ("a100-pair", {"shares": [0, 0]}, 400, None),
                ("a100-pair", {"shares": [1, -1]}, 400, None),
                ("a100-pair", {"shares": [1, 1, 1]}, 400, "invalid"),
                ("a100-pair", {"shares": "much"}, 400, None),
                ("a100-pair", {"cornr": "even"}, 400, None),
            ):
                refused = await order(name, **body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), (name, body, refused.text)

    play(tmp_path, body)


def test_join(tmp_path, kernels):
    """A parked group's rank joins another; both say so from then on, and what cannot be is refused by name."""

    async def body(client, service) -> None:
        names = [backend.name for backend in service.dispatcher.backends]
        donor, target = names.index("l4"), names.index("a10g")
        async with client() as http:

            async def join(name: str, **body):
                return await http.post(f"/admin/groups/{name}/join", json=body)

            running = await join("l4", target="a10g")
            assert running.status_code == 409 and "it is not parked" in running.text
            assert (await service.control.moves.carry_out(Command(CommandKind.SCALE_IN, donor), "test", "")).outcome == "done"
            for name, body, status, code, said in (
                ("nobody", {"target": "a10g"}, 404, "unknown_group", "nobody"),
                ("l4", {"target": "nobody"}, 404, "unknown_group", "nobody"),
                ("l4", {"target": "a100-pair"}, 422, "not_possible", "together 3 ranks"),
                ("l4", {"target": "h100"}, 422, "not_possible", "foreign"),
                ("h100", {"target": "l4"}, 422, "not_possible", "foreign"),
                ("l4", {}, 400, None, "target"),
                ("l4", {"target": 3}, 400, None, "target"),
            ):
                refused = await join(name, **body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), (name, body, refused.text)
                assert said in refused.text
            answers = [asyncio.create_task(http.post("/v1/completions", json=ask())) for _ in range(8)]
            await asyncio.sleep(0.1)
            said = await join("l4", target="a10g")
            assert said.status_code == 200, said.text
            assert {key: said.json()[key] for key in ("group", "state", "target", "ranks")} == {
                "group": "l4", "state": "joined", "target": "a10g", "ranks": 2,
            }  # fmt: skip
            assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
            state = (await http.get("/admin/state")).json()
            assert all(set(group) == GROUP_KEYS for group in state["groups"])
            gone, merged = state["groups"][donor], state["groups"][target]
            assert (gone["state"], gone["accepts"], gone["can"], gone["ranks"], gone["plan"]) == ("joined", False, [], [], None)
            assert gone["kv"] == {"tokens_total": None, "tokens_used": None, "used_fraction": None}
            assert "its ranks serve in a10g" in gone["detail"] and "its ranks serve in a10g" in gone["cannot"]["scale_out"]
            assert merged["state"] == "serving" and [rank["gpu"] for rank in merged["ranks"]] == ["A10G", "L4"]
            assert len(merged["plan"]["query_heads"]) == 2 and "regroup" in merged["can"]
            move = state["moves"][0]
            assert (move["kind"], move["group"], move["target"], move["outcome"]) == ("regroup", "l4", "a10g", "done")
            for order, body in (("drain", {}), ("undrain", {}), ("resplit", {"corner": "even"}), ("join", {"target": "a10g"})):
                again = await http.post(f"/admin/groups/l4/{order}", json=body)
                assert again.status_code == 409 and "its ranks serve in a10g" in again.text, (order, again.text)

    play(tmp_path, body)


def test_a_move_that_outlasts_its_caller_goes_on(tmp_path, kernels, monkeypatch):
    """504 after ORDER_WAIT_S; the split is then in force, known, and in the log: never half done and forgotten."""
    monkeypatch.setattr("runtime.gateway.admin.ORDER_WAIT_S", 0.05)

    async def body(client, service) -> None:
        moves, backend, go_on = service.control.moves, service.dispatcher.backends[0], asyncio.Event()
        split = backend.set_split

        async def slowly(plan):
            await go_on.wait()
            return await split(plan)

        monkeypatch.setattr(backend, "set_split", slowly)
        async with client() as http:
            late = await http.post("/admin/groups/a100-pair/resplit", json={"shares": [3, 1]})
            assert late.status_code == 504
            assert (await http.get("/admin/state")).json()["moves_under_way"]
            go_on.set()
            async with asyncio.timeout(GUARD_S):
                while moves.under_way:
                    await asyncio.sleep(0.01)
            assert [move.outcome for move in moves.log] == ["done"]

    play(tmp_path, body)


def test_who_may_ask(tmp_path, kernels):
    """Without keys loopback alone; with keys whoever has one; an order needs a JSON content type."""

    async def open_to_loopback(client, service) -> None:
        async with client() as here, client(ELSEWHERE) as there:
            assert (await here.get("/admin/state")).status_code == 200
            assert (await there.get("/admin/state")).status_code == 403
            assert (await there.post("/admin/groups/a100-pair/drain", headers=JSON)).status_code == 403
            plain = await here.post("/admin/groups/a100-pair/drain", content="{}", headers={"content-type": "text/plain"})
            assert plain.status_code == 415
            for host, status in (
                ("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("", 403), ("10.0.0.1", 403),
                ("localhost:8000", 200), ("[::1]:8000", 200),
            ):  # fmt: skip
                assert (await here.get("/admin/state", headers={"host": host})).status_code == status, host
            large = await here.post("/admin/groups/a100-pair/drain", content=b" " * 70_000, headers=JSON)
            assert large.status_code == 413
            assert not service.dispatcher.telemetry.is_draining.any()

    async def behind_keys(client, service) -> None:
        async with client(ELSEWHERE) as http:
            for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Bearer secret"}, 200)):
                assert (await http.get("/admin/state", headers=headers)).status_code == status
            assert (await http.post("/admin/groups/a100-pair/drain", headers=JSON)).status_code == 401

    play(tmp_path, open_to_loopback)
    play(tmp_path, behind_keys, keys=("secret",))
