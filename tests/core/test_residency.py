"""Which models are in memory: one rule a test, then random histories."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.core.residency import ModelState, Move, Residency, Resident
from pyllama_raw.errors import ModelTooLarge
from tests.core.residency_support import Arrival, Replay, least_loads, residency_of

MODELS = "ABCDEFGHIJKL"
NOTHING = ((), ())


def turn_of(residency: Residency, now: float):
    """Models whose requests run, and moves."""
    turn = residency.decide(now)
    return tuple(claim.model for claim in turn.run), turn.moves


def use(residency: Residency, name: str, now: float, keep_s=None) -> None:
    """Load a model and serve one request of it."""
    claim = residency.enter(name, now)
    if residency.models[name].state is not ModelState.LOADED:
        for victim, _ in residency.decide(now).moves[:-1]:
            residency.gone(victim)
        residency.decide(now)
        residency.loaded(name, now, 1.0)
    residency.decide(now)
    residency.leave(claim, now, keep_s)


# -- loads and requests -----------------------------------------------------------


def test_all_that_wait_for_a_model_run_together():
    """
    One load serves all of them, and those that come when it is there run at once.
    """
    residency = residency_of("A", 1)
    for _ in range(3):
        residency.enter("A", 0.0)
    first_turn = turn_of(residency, 0.0)
    meanwhile = turn_of(residency, 1.0)
    residency.loaded("A", 2.0, 2.0)
    served = turn_of(residency, 2.0)
    residency.enter("A", 3.0)

    assert first_turn == ((), (("A", Move.LOAD),))
    assert meanwhile == NOTHING
    assert served == (("A", "A", "A"), ())
    assert turn_of(residency, 3.0) == (("A",), ())
    assert residency.free() == {"CPU": 0}


def test_only_idle_models_give_way():
    """
    B waits until the request of A has ended; A is closed to nobody before B is due.
    """
    residency = residency_of("AB", 1)
    first = residency.enter("A", 0.0)
    residency.decide(0.0)
    residency.loaded("A", 1.0, 1.0)
    residency.decide(1.0)
    residency.enter("B", 2.0)
    waiting = turn_of(residency, 2.0)
    second = residency.enter("A", 3.0)
    overtaking = turn_of(residency, 3.0)
    residency.leave(first, 4.0)
    residency.leave(second, 4.0)
    leaving = turn_of(residency, 4.0)
    residency.gone("A")

    assert waiting == NOTHING
    assert overtaking == (("A",), ())
    assert leaving == ((), (("A", Move.UNLOAD),))
    assert turn_of(residency, 5.0) == ((), (("B", Move.LOAD),))


@pytest.mark.parametrize("by", ["time", "overtakes"])
def test_a_model_in_the_way_of_a_due_request_is_closed(by):
    """
    What comes for it waits, so it gets empty; those whom it was loaded for run before.
    """
    residency = residency_of(
        "AB", 1, max_wait_s=5.0, max_overtakes=1 if by == "overtakes" else 99
    )
    first = residency.enter("A", 0.0)
    residency.decide(0.0)
    residency.enter("B", 0.0)
    residency.loaded("A", 1.0, 1.0)
    residency.decide(1.0)
    now = 6.0
    if by == "overtakes":
        now = 2.0
        second = residency.enter("A", now)
        residency.decide(now)
        residency.leave(second, now)
    late = residency.enter("A", now)
    closed = turn_of(residency, now)
    residency.leave(first, now)
    leaving = turn_of(residency, now)
    residency.gone("A")
    loading = turn_of(residency, now)
    residency.loaded("B", now, 1.0)
    served = turn_of(residency, now)

    assert closed == NOTHING
    assert leaving == ((), (("A", Move.UNLOAD),))
    assert loading == ((), (("B", Move.LOAD),))
    assert served == (("B",), ())
    assert not late.is_running


def test_time_alone_makes_a_request_due():
    """
    next_time() says when to look again; a model that takes long to load is due later.
    """
    residency = residency_of("AB", 1, max_wait_s=5.0)
    residency.models["B"].load_s = 30.0
    use(residency, "A", 0.0)
    residency.enter("A", 1.0)
    residency.decide(1.0)
    residency.enter("B", 2.0)
    residency.decide(2.0)

    assert residency.next_time(2.0) == 32.0
    assert residency_of("A", 1).next_time(0.0) == inf


def test_a_small_model_may_load_before_a_large_one_until_that_is_due():
    """
    Then nobody else gets the room that it waits for.
    """
    residency = Residency({"CPU": 3}, max_wait_s=5.0)
    for name, n in (("A", 2), ("large", 3), ("B", 1), ("C", 1)):
        residency.add(Resident(name, {"CPU": n}))
    use(residency, "A", 0.0)
    residency.enter("A", 0.0)
    residency.decide(0.0)
    residency.enter("large", 1.0)
    residency.enter("B", 2.0)
    early = turn_of(residency, 2.0)
    residency.loaded("B", 3.0, 1.0)
    residency.decide(3.0)
    residency.enter("C", 6.0)

    assert early == ((), (("B", Move.LOAD),))
    assert turn_of(residency, 6.0) == NOTHING


def test_clients_take_turns_with_loads():
    """
    One that waits for many models does not hold up another one, also if it came first.
    """
    residency = residency_of("ABCD", 1, max_wait_s=1e9)
    for name in "ABC":
        residency.enter(name, 0.0, "greedy")
    loads = []
    residency.decide(0.0)
    residency.enter("D", 0.0, "modest")
    for _ in range(4):
        [name] = [m.name for m in residency.models.values() if m.state == "loading"]
        loads.append(name)
        residency.loaded(name, 0.0, 1.0)
        for claim in residency.decide(0.0).run:
            residency.leave(claim, 0.0)
        residency.decide(0.0)
        residency.gone(name)
        residency.decide(0.0)

    assert loads == ["A", "B", "D", "C"]


def test_a_client_that_comes_back_has_saved_nothing_up():
    """
    It counts from the least that those who wait were charged.
    """
    residency = residency_of("ABCD", 1, max_wait_s=1e9)
    residency.enter("A", 0.0, "busy")
    residency.decide(0.0)
    residency.enter("B", 0.0, "late")
    residency.enter("C", 0.0, "busy")
    residency.loaded("A", 0.0, 1.0)
    for claim in residency.decide(0.0).run:
        residency.leave(claim, 0.0)
    residency.decide(0.0)
    residency.gone("A")

    assert turn_of(residency, 0.0) == ((), (("B", Move.LOAD),))


# -- what gives way ---------------------------------------------------------------


def test_what_is_cheap_to_load_again_gives_way():
    """
    Of models that were used alike. One that was used long ago gives way at last, too.
    """
    residency = residency_of("ABC", 2)
    residency.models["A"].load_s = 60.0
    for name in "AB":
        claim = residency.enter(name, 0.0)
        residency.decide(0.0)
        residency.loaded(name, 0.0, 60.0 if name == "A" else 1.0)
        residency.decide(0.0)
        residency.leave(claim, 0.0)
    residency.enter("C", 1.0)

    assert turn_of(residency, 1.0) == ((), (("B", Move.UNLOAD),))


def test_no_more_gives_way_than_is_of_use():
    """
    A small model that was chosen first stays if a large one has to leave anyway.
    """
    residency = Residency({"CPU": 4, "GPU": 9})
    for name, n in (("small", 1), ("large", 3), ("next", 3), ("elsewhere", 0)):
        residency.add(Resident(name, {"CPU": n} if n else {"GPU": 1}))
    for name in ("elsewhere", "small", "large"):
        claim = residency.enter(name, 0.0)
        residency.decide(0.0)
        residency.loaded(name, 0.0, 1.0 if name == "small" else 60.0)
        residency.decide(0.0)
        residency.leave(claim, 0.0)
    residency.enter("next", 1.0)

    assert turn_of(residency, 1.0) == ((), (("large", Move.UNLOAD),))
    assert turn_of(residency, 1.0) == NOTHING


def test_pinned_models_stay():
    """
    Nobody waits for ever for room that a pinned model has.
    """
    residency = residency_of("ABC", 2)
    residency.models["A"].is_pinned = True
    use(residency, "A", 0.0)
    use(residency, "B", 1.0)
    residency.enter("C", 2.0)
    residency.models["large"] = Resident("large", {"CPU": 2})

    assert turn_of(residency, 2.0) == ((), (("B", Move.UNLOAD),))
    with pytest.raises(ModelTooLarge, match="large takes 2 of CPU and at most 1"):
        residency.enter("large", 3.0)


def test_places_without_a_limit_have_room():
    """
    Only devices that the budget names count.
    """
    residency = Residency({})
    residency.add(Resident("A", {"CPU": 10**15}))
    residency.enter("A", 0.0)

    assert turn_of(residency, 0.0) == ((), (("A", Move.LOAD),))
    assert residency.free() == {}


# -- idle times ---------------------------------------------------------------------


def test_an_idle_model_sleeps_and_is_unloaded_later():
    """
    A request wakes it; while it sleeps it takes what is parked.
    """
    residency = Residency({"CPU": 10})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0, unload_s=60.0))
    use(residency, "A", 0.0)
    times = [residency.next_time(0.0)]
    falling = turn_of(residency, 5.0)
    n_used = [residency.free()["CPU"]]
    residency.gone("A", asleep=True)
    n_used.append(residency.free()["CPU"])
    times.append(residency.next_time(5.0))
    claim = residency.enter("A", 10.0)
    waking = turn_of(residency, 10.0)
    residency.loaded("A", 11.0, 1.0)
    residency.decide(11.0)
    residency.leave(claim, 11.0)
    residency.decide(16.0)
    residency.gone("A", asleep=True)

    assert times == [5.0, 60.0]
    assert falling == ((), (("A", Move.SLEEP),))
    assert n_used == [1, 9]
    assert waking == ((), (("A", Move.LOAD),))
    assert turn_of(residency, 71.0) == ((), (("A", Move.UNLOAD),))


def test_a_time_that_went_by_while_the_process_was_busy_is_now():
    """
    A model that should have slept by then sleeps, although nothing else happens.
    """
    residency = Residency({"CPU": 10})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0))
    use(residency, "A", 0.0)
    late = residency.next_time(7.0)
    falling = turn_of(residency, 7.0)

    assert (late, falling) == (7.0, ((), (("A", Move.SLEEP),)))
    assert residency.next_time(8.0) == inf


def test_a_model_without_room_to_sleep_is_unloaded():
    """
    What it holds is in memory twice for a moment.
    """
    residency = Residency({"CPU": 8})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0))
    use(residency, "A", 0.0)

    assert turn_of(residency, 5.0) == ((), (("A", Move.UNLOAD),))


def test_a_model_that_cannot_sleep_stays():
    """
    It is not tried again until it is loaded anew.
    """
    residency = Residency({"CPU": 10})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0))
    use(residency, "A", 0.0)
    residency.decide(5.0)
    residency.stayed("A")

    assert turn_of(residency, 50.0) == NOTHING
    assert residency.models["A"].state is ModelState.LOADED


def test_a_request_says_how_long_its_model_stays():
    """
    0 unloads it at once, inf never; the next request that says nothing has the usual time.
    """
    residency = residency_of("A", 1)
    residency.models["A"].unload_s = 10.0
    use(residency, "A", 0.0, keep_s=inf)
    stays = turn_of(residency, 1e6)
    use(residency, "A", 1e6)
    usual = residency.next_time(1e6)
    use(residency, "A", 1e6 + 1, keep_s=0.0)

    assert stays == NOTHING
    assert usual == 1e6 + 10
    assert turn_of(residency, 1e6 + 1) == ((), (("A", Move.UNLOAD),))


def test_a_sleeping_model_gives_way_to_another():
    """
    Its parked bytes are room as any others.
    """
    residency = Residency({"CPU": 10})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0))
    residency.add(Resident("B", {"CPU": 10}))
    use(residency, "A", 0.0)
    residency.decide(5.0)
    residency.enter("B", 6.0)
    meanwhile = turn_of(residency, 6.0)
    residency.gone("A", asleep=True)

    assert meanwhile == NOTHING
    assert turn_of(residency, 7.0) == ((), (("A", Move.UNLOAD),))


# -- failures, and what a person says -----------------------------------------------


def test_a_load_that_fails_ends_its_requests_and_rests():
    """
    Longer with each failure, a minute at most; a load that works begins anew.
    """
    residency = residency_of("A", 1)
    rests = []
    for _ in range(8):
        claim = residency.enter("A", 0.0)
        residency.decide(0.0)
        assert residency.failed("A", 0.0) == (claim,)
        residency.leave(claim, 0.0)
        rests.append(residency.models["A"].retry_at)
    room = residency.free()
    use(residency, "A", 99.0)

    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert room == {"CPU": 1}
    assert residency.models["A"].n_failures == 0


def test_a_model_that_dies_is_loaded_again():
    """
    At once the first time; then it rests, until it has served a request.
    """
    residency = residency_of("A", 1)
    rests, model = [], residency.models["A"]

    def die():
        claim = residency.enter("A", 0.0)
        residency.decide(0.0)
        residency.loaded("A", 0.0, 1.0)
        residency.decide(0.0)
        residency.died("A", 0.0)
        rests.append(max(model.retry_at, 0.0))
        while_it_runs = turn_of(residency, 0.0)
        residency.leave(claim, 0.0)
        moves = turn_of(residency, 0.0)
        residency.gone("A")
        return while_it_runs, moves

    turns = [die() for _ in range(3)]
    use(residency, "A", 0.0)
    residency.unload("A")
    residency.decide(0.0)
    residency.gone("A")
    turns.append(die())

    assert turns == [(NOTHING, ((), (("A", Move.UNLOAD),)))] * 4
    assert rests == [0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("end", ["failed", "gave_up"])
def test_a_wake_that_does_not_end_leaves_the_model_asleep(end):
    """
    What it holds is still there.
    """
    residency = Residency({"CPU": 10})
    residency.add(Resident("A", {"CPU": 8}, {"CPU": 1}, sleep_s=5.0))
    use(residency, "A", 0.0)
    residency.decide(5.0)
    residency.gone("A", asleep=True)
    residency.enter("A", 6.0)
    residency.decide(6.0)
    if end == "failed":
        residency.failed("A", 7.0)
    else:
        residency.gave_up("A")

    assert residency.models["A"].state is ModelState.SLEEPING
    assert residency.free() == {"CPU": 9}


def test_a_load_that_nobody_waits_for_frees_its_room():
    """
    It can be first_turn again at once.
    """
    residency = residency_of("A", 1)
    claim = residency.enter("A", 0.0)
    residency.decide(0.0)
    residency.leave(claim, 1.0)
    residency.gave_up("A")
    residency.enter("A", 2.0)

    assert turn_of(residency, 2.0) == ((), (("A", Move.LOAD),))


def test_a_model_that_is_to_leave_lets_run_what_runs():
    """
    What comes meanwhile loads it again. A model that is nowhere cannot leave.
    """
    residency = residency_of("A", 1)
    residency.unload("A")
    claim = residency.enter("A", 0.0)
    residency.decide(0.0)
    residency.loaded("A", 0.0, 1.0)
    residency.decide(0.0)
    residency.unload("A")
    residency.enter("A", 1.0)
    closed = turn_of(residency, 1.0)
    residency.leave(claim, 2.0)
    leaving = turn_of(residency, 2.0)
    residency.gone("A")

    assert closed == NOTHING
    assert leaving == ((), (("A", Move.UNLOAD),))
    assert turn_of(residency, 3.0) == ((), (("A", Move.LOAD),))


def test_a_model_that_is_forgotten_is_not_there():
    """
    Another one may have its name.
    """
    residency = residency_of("A", 1)
    residency.forget("A")
    residency.add(Resident("A", {"CPU": 1}))

    assert [*residency.models] == ["A"]


# -- histories ----------------------------------------------------------------------


def orders() -> dict[str, str]:
    """Four hundred requests each."""
    draw = random.Random(1)  # noqa: S311
    weights = [1 / (rank + 1) for rank in range(len(MODELS))]
    return {
        "random": "".join(draw.choices(MODELS, k=400)),
        "zipf": "".join(draw.choices(MODELS, weights, k=400)),
        "abaaca": ("ABAACA" * 67)[:400],
        "in turn": (MODELS * 34)[:400],
    }


@pytest.mark.parametrize("name", orders())
@pytest.mark.parametrize("n_streams", [16, 64, 400])
def test_twelve_models_share_room_for_four(name, n_streams):
    """
    Loads are at most 1.3 times those of who knows the whole order and serves it as it is; nobody
    waits more than twice as long as where models take strict turns; none is lost.
    """
    order = orders()[name]
    arrivals = [Arrival(model, serve_s=2.0) for model in order]
    history = Replay(residency_of(MODELS, 4), arrivals, n_streams=n_streams).run()
    turns = residency_of(MODELS, 4, max_wait_s=0.0, max_overtakes=0)
    fair = Replay(turns, arrivals, n_streams=n_streams).run()

    assert history.n_served == 400
    assert history.most_bytes <= 4
    assert history.n_loads <= 1.3 * least_loads(order, 4)
    assert max(history.waits) <= 2 * max(fair.waits)


def test_a_b_a_a_c_a_neither_thrashes_nor_starves():
    """
    With room for one: what waits for A runs together, then B and C have their turns.
    """
    arrivals = [Arrival(model) for model in "ABAACA"]
    history = Replay(residency_of("ABC", 1), arrivals).run()

    assert history.loads == ["A", "B", "C"]
    assert history.served == [*"AAAABC"]


def test_a_stream_of_requests_for_one_model_starves_nobody():
    """
    A is never idle by itself. B waits for max_overtakes requests of A, what runs, and loads.
    """
    arrivals = [Arrival("A", at=0.5 * n) for n in range(200)] + [Arrival("B", at=12.0)]
    history = Replay(residency_of("AB", 1, max_overtakes=8), arrivals).run()

    assert history.n_served == 201
    assert max(history.waits) <= 8 * 0.5 + 1.0 + 2 * 10.5 + 10.0


SIZES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any), min_size=1, max_size=6
)
CLIENTS = st.sampled_from(["", "a", "b"])


@settings(max_examples=300, deadline=None)
@given(
    sizes=SIZES,
    requests=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 50), st.floats(0.1, 20), CLIENTS),
        max_size=40,
    ),
    rests=st.tuples(st.sampled_from([3.0, inf]), st.sampled_from([7.0, inf])),
    max_overtakes=st.integers(0, 10),
    failing=st.integers(0, 9),
)
def test_random_histories_keep_the_budget_and_lose_nobody(
    sizes, requests, rests, max_overtakes, failing
):
    """
    Models of any size on two devices, with idle times, clients and loads that fail: each request
    is served, or fails with its load.
    """
    residency = Residency(
        {"CPU": 6, "GPU": 5}, max_wait_s=20.0, max_overtakes=max_overtakes
    )
    for number, (host, device) in enumerate(sizes):
        residency.add(
            Resident(
                str(number), {"CPU": host, "GPU": device}, {"CPU": min(host, 1)},
                sleep_s=rests[0], unload_s=rests[1],
            )
        )  # fmt: skip
    arrivals = [
        Arrival(str(model % len(sizes)), at, serve_s, client)
        for model, at, serve_s, client in requests
    ]
    replay = Replay(residency, arrivals, fails=lambda name: name == str(failing))
    history = replay.run()

    assert history.n_served + history.n_failed == len(arrivals)
    assert all(model.is_idle for model in residency.models.values())


@settings(max_examples=200, deadline=None)
@given(order=st.text("ABCDEF", min_size=1, max_size=60), room=st.integers(1, 5))
def test_what_comes_at_once_loads_each_model_once(order, room):
    """
    Nobody could load less.
    """
    arrivals = [Arrival(model) for model in order]
    history = Replay(residency_of("ABCDEF", room), arrivals).run()

    assert history.n_loads == len({*order})


@settings(max_examples=200, deadline=None)
@given(
    order=st.lists(
        st.tuples(st.sampled_from("ABCDEF"), st.floats(0, 100), st.floats(0.1, 10)),
        min_size=1,
        max_size=50,
    ),
    room=st.integers(1, 4),
)
def test_nobody_waits_more_than_twice_the_fair_time(order, room):
    """
    The fair time is the longest wait where models take strict turns, and one turn of all models.
    """
    arrivals = [Arrival(model, at, serve_s) for model, at, serve_s in order]
    history = Replay(residency_of("ABCDEF", room, max_wait_s=20.0), arrivals).run()
    turns = residency_of("ABCDEF", room, max_wait_s=0.0, max_overtakes=0)
    fair = Replay(turns, arrivals).run()
    one_turn = 10.0 + 0.5 + max(arrival.serve_s for arrival in arrivals)

    assert max(history.waits) <= 2 * max([*fair.waits, one_turn])
