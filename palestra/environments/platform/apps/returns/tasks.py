"""Tasks of `returns`: a customer each, of whom one kind may have something back and others may not."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.returns.seed import policy
from palestra.environments.platform.changes import Row
from palestra.environments.platform.expectations import FREE, Expected, InsertedRow, UpdatedRow
from palestra.environments.platform.scripted_user import money
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall, SolutionPart
from palestra.environments.platform.user_tasks import heard, say, user_params

template = TemplateMaker("palestra.environments.platform.apps.returns", users=True)


def _case(*kinds: str):
    def params(rng: random.Random, seed: SeedDatabase) -> Params | None:
        return user_params(rng, seed, policy(), kinds)

    return params


def _identified(params: Params) -> SolutionPart[Row]:
    """Asks who is on the line, and returns the customer on file."""
    yield say("Hello! Could you tell me your e-mail address and your postcode?")
    return (yield SolutionCall("find_customer", {"email": params["facts"]["email"]}))


def _found(params: Params) -> SolutionPart[tuple[Row, Row]]:
    """Returns the customer and the item."""
    customer = yield from _identified(params)
    yield say("Which item would you like to return, and what is the reason?")
    for order in customer["orders"]:
        shown = yield SolutionCall("get_order", {"id": order["id"]})
        for item in shown["items"]:
            if item["id"] == params["case"]["id"]:
                return customer, item
    raise LookupError(f"there is no item {params['case']['id']}")


def _returned(params: Params, _seed: SeedDatabase) -> list[Expected]:
    case = params["case"]
    refund = {"item_id": case["id"], "reason": case["reason"], "refund_to": case["refund_to"], "cents": case["refund"]}
    done = UpdatedRow("items", (case["id"],), {"state": "returned"})
    return [done, InsertedRow("refunds", refund), heard("amount", str(case["refund"]))]


def _propose(params: Params) -> SolutionCall:
    case = params["case"]
    return say(f"You would get {money(case['refund'])} for the {case['name']}. Shall I go ahead?")


@template("2", params=_case("mind", "voucher", "broken", "gold", "excluded_broken"), expect=_returned)
def return_item(params: Params) -> Solution:
    _, item = yield from _found(params)
    yield say("Should the refund go to your card, or would you like a voucher?")
    yield _propose(params)
    case = params["case"]
    yield SolutionCall(
        "start_return",
        {
            "item_id": item["id"],
            "reason": case["reason"],
            "refund_to": case["refund_to"],
            "refund_cents": case["refund"],
        },
    )


RULES = {"late": "R2", "late_gold": "R2", "excluded": "R3"}


@template(
    "2",
    params=_case(*RULES),
    expect=lambda params, _seed: [heard("rule", RULES[params["kind"]])],
)
def refuse_return(params: Params) -> Solution:
    yield from _found(params)
    yield say(f"I am sorry, I cannot take it back: that is rule {RULES[params['kind']]} of our policy.")


@template("2", params=_case("stranger"), expect=lambda _params, _seed: [heard("rule", "R1")])
def refuse_stranger(params: Params) -> Solution:
    yield from _identified(params)
    yield say("I am sorry, I cannot help you: the postcode is not the one on file, see rule R1.")


@template("3", params=_case("declined"), expect=lambda params, _seed: [heard("amount", str(params["case"]["refund"]))])
def accept_a_no(params: Params) -> Solution:
    yield from _found(params)
    yield say("Should the refund go to your card, or would you like a voucher?")
    yield _propose(params)


@template(
    "3",
    params=_case("dear"),
    expect=lambda params, _seed: [
        InsertedRow("transfers", {"customer_id": params["case"]["customer"], "reason": FREE})
    ],
)
def hand_over(params: Params) -> Solution:
    customer, item = yield from _found(params)
    reason = f"refund of more than $300 for the {item['name']}"
    yield SolutionCall("transfer_to_human", {"customer_id": customer["id"], "reason": reason})


TASKS = (return_item, refuse_return, refuse_stranger, accept_a_no, hand_over)
