"""Tasks of `flights`: a passenger each who wants another flight, or none."""

from __future__ import annotations

import random
from collections.abc import Callable

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.flights.seed import policy
from palestra.environments.platform.changes import Row
from palestra.environments.platform.expectations import FREE, Expected, InsertedRow, UpdatedRow
from palestra.environments.platform.scripted_user import money
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall, SolutionPart
from palestra.environments.platform.user_tasks import heard, say, user_params

template = TemplateMaker("palestra.environments.platform.apps.flights", users=True)

Drawn = Callable[[random.Random, SeedDatabase], Params | None]


def _case(*kinds: str) -> Drawn:
    return lambda rng, seed: user_params(rng, seed, policy(), kinds)


def _booking(params: Params) -> SolutionPart[Row]:
    yield say("Hello! Please tell me your booking code and your last name.")
    return (yield SolutionCall("find_booking", {"code": params["case"]["code"]}))


def _new_flight(params: Params) -> SolutionPart[Row]:
    """Asks for the wish, and returns the flight that fits."""
    booking = yield from _booking(params)
    yield say("On which day would you like to fly, and from what time on?")
    route = {name: booking["flight"][name] for name in ("origin", "destination")}
    found = yield SolutionCall("search_flights", {**route, "day": params["facts"]["day"]})
    earliest = f"{params['facts']['day']}T{params['facts']['from_time']}"
    return next(
        one
        for one in found["flights"]
        if one["departs_at"] >= earliest and one["seats"] and one["state"] == "scheduled"
    )


def _changed(params: Params, _seed: SeedDatabase) -> list[Expected]:
    case = params["case"]
    return [
        UpdatedRow("bookings", (case["code"],), {"flight_id": case["new"]}),
        InsertedRow("payments", {"code": case["code"], "kind": "charge", "cents": case["cents"]}),
        heard("amount", str(case["cents"])),
    ]


def _propose(params: Params, flight: Row) -> SolutionCall:
    when = flight["departs_at"].replace("T", " at ")[:-3]
    return say(f"There is a flight on {when}. The change costs {money(params['case']['cents'])}. Shall I go ahead?")


@template("2", params=_case("flex", "business", "dearer", "grounded"), expect=_changed)
def change_flight(params: Params) -> Solution:
    flight = yield from _new_flight(params)
    yield _propose(params, flight)
    charge = params["case"]["cents"]
    yield SolutionCall(
        "change_flight", {"code": params["case"]["code"], "flight_id": flight["id"], "charge_cents": charge}
    )


def _cancelled(params: Params, _seed: SeedDatabase) -> list[Expected]:
    case = params["case"]
    return [
        UpdatedRow("bookings", (case["code"],), {"state": "cancelled"}),
        InsertedRow("payments", {"code": case["code"], "kind": "refund", "cents": case["cents"]}),
        heard("amount", str(case["cents"])),
    ]


@template("2", params=_case("cancel_flex", "cancel_business", "cancel_grounded"), expect=_cancelled)
def cancel_flight(params: Params) -> Solution:
    yield from _booking(params)
    cents = params["case"]["cents"]
    yield say(f"You would get back {money(cents)}. Shall I cancel the booking, do you agree?")
    yield SolutionCall("cancel_booking", {"code": params["case"]["code"], "refund_cents": cents})


RULES = {"basic": "R2", "cancel_basic": "R2", "soon": "R4", "cancel_soon": "R4", "stranger": "R1"}


@template("2", params=_case(*RULES), expect=lambda params, _seed: [heard("rule", RULES[params["kind"]])])
def refuse_passenger(params: Params) -> Solution:
    yield from _booking(params)
    yield say(f"I am sorry, I cannot do that: rule {RULES[params['kind']]} of our policy is against it.")


@template("3", params=_case("declined"), expect=lambda params, _seed: [heard("amount", str(params["case"]["cents"]))])
def accept_a_no(params: Params) -> Solution:
    flight = yield from _new_flight(params)
    yield _propose(params, flight)


@template(
    "3",
    params=_case("human"),
    expect=lambda params, _seed: [InsertedRow("transfers", {"code": params["case"]["code"], "reason": FREE})],
)
def hand_over(params: Params) -> Solution:
    flight = yield from _new_flight(params)
    reason = f"the change to flight {flight['id']} costs more than $500"
    yield SolutionCall("transfer_to_human", {"code": params["case"]["code"], "reason": reason})


TASKS = (change_flight, cancel_flight, refuse_passenger, accept_a_no, hand_over)
