"""Our engine as a target: what calls ask for, and what logs say of calls that warm up."""

from contextlib import asynccontextmanager
from functools import partial

import pytest

from pyllama_raw import LogConfig
from pyllama_raw.engine.logs import open_logs
from pyllama_raw.lab.calls import Call, attempt
from pyllama_raw.lab.targets import EngineTarget, Plan, Point, ReadyTarget
from pyllama_raw.testing import fake_engine

pytestmark = pytest.mark.anyio
LOGS = LogConfig(max_steps=1000, max_requests=1000)


@asynccontextmanager
async def opened(engines):
    """An engine with logs, which *engines* keeps."""
    async with fake_engine(logs=open_logs(LOGS)) as engine:
        engines.append(engine)
        yield ReadyTarget(EngineTarget(engine))


async def test_an_engine_gets_all_that_a_call_asks_for():
    """
    The request log has the client, the priority, the deadline and the data of its policy.
    """
    options = {
        "priority": 3,
        "deadline_s": 90.0,
        "client": "ann",
        "policy_data": {"tier": "gold"},
    }
    async with fake_engine(logs=open_logs(LOGS)) as engine:
        done = await attempt(EngineTarget(engine), Call([5, 6, 7], 4, **options))

    (record,) = engine.request_log()
    values = {name: getattr(record, name) for name in options}
    assert done.error is None
    assert values == options | {"deadline_s": pytest.approx(90.0, abs=60)}


async def test_a_deadline_that_was_over_is_told():
    """
    The call has failed, and says why.
    """
    async with fake_engine() as engine:
        late = Call([5, 6, 7], 1000, deadline_s=1e-9)
        done = await attempt(EngineTarget(engine), late)

    assert done.error == (
        "CallFailed: deadline_s=1e-09 was over when 0 of 1000 tokens came"
    )


async def test_logs_mark_what_warms_up():
    """
    Requests and steps, and no others; whoever warms up is nobody's client.
    """
    engines = []
    plan = Plan(
        {"engine": partial(opened, engines)},
        [Point(clients=2)],
        lambda _: [Call([5, 6, 7], 4, client="ann", deadline_s=90.0)] * 5,
        rounds=1,
        warm_up=3,
    )
    results = [result async for result in plan.results()]

    (engine,) = engines
    requests, steps = engine.request_log(), engine.step_log()
    warming = {record.request_id for record in requests if record.warms_up}
    rows = [(r.warms_up, r.client, r.deadline_s is None) for r in requests]
    assert rows == [(True, None, True)] * 3 + [(False, "ann", False)] * 5
    for step in steps:
        ids = {work[0] for work in (*step.decodes, *step.chunks)}
        assert step.warms_up == bool(ids & warming)
    assert {step.warms_up for step in steps} == {True, False}
    assert [result["completed"] for result in results] == [5]
