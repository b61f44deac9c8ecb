"""Tools of `returns`: they do what they are told; whether the policy allows it is the agent's affair."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.apps.returns.seed import FACTS
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.scripted_user import check_allowed, talk_tool
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import ToolOutput, tool

IDENTITY = ("email", "postcode")
talk_to_user = talk_tool(FACTS, IDENTITY)


@tool()
def find_customer(context: ToolContext, email: str) -> ToolOutput:
    """Find a customer by e-mail address: name, postcode on file, tier, orders with their days of delivery."""
    found = context.found(
        f"there is no customer with the address {email[:80]!r}",
        "ask the user for it",
        "SELECT * FROM customers WHERE email = ?",
        email.strip().lower(),
    )
    orders = context.rows("SELECT id, delivered_on FROM orders WHERE customer_id = ? ORDER BY id", found["id"])
    return {**found, "orders": orders}


@tool()
def get_order(context: ToolContext, id: int) -> ToolOutput:
    """Show an order: its items with their kinds, prices in cents and states."""
    order = context.found(
        f"there is no order {id}", "find_customer shows orders", "SELECT * FROM orders WHERE id = ?", id
    )
    query = "SELECT id, name, kind, cents, state FROM items WHERE order_id = ? ORDER BY id"
    return {**order, "items": context.rows(query, id)}


@tool(writes=True)
def start_return(
    context: ToolContext,
    item_id: int,
    reason: Literal["broken", "wrong_item", "changed_mind"],
    refund_to: Literal["card", "voucher"],
    refund_cents: int,
) -> ToolOutput:
    """Start the return of an item and pay back this amount of cents."""
    item = context.found(
        f"there is no item {item_id}", "get_order shows items", "SELECT * FROM items WHERE id = ?", item_id
    )
    if item["state"] != "delivered":
        raise ToolError("already_returned", f"item {item_id} is {item['state']}")
    if not 0 <= refund_cents <= item["cents"]:
        raise ToolError("bad_arguments", f"refund_cents must be 0 to {item['cents']}")
    check_allowed(context, (*IDENTITY, "reason", "refund_to"), refund_cents)
    context.run("UPDATE items SET state = 'returned' WHERE id = ?", item_id)
    context.insert("refunds", item_id=item_id, reason=reason, refund_to=refund_to, cents=refund_cents)
    return {"item_id": item_id, "state": "returned", "refunded_cents": refund_cents, "refund_to": refund_to}


@tool(writes=True)
def transfer_to_human(context: ToolContext, customer_id: int, reason: str) -> ToolOutput:
    """Hand the case over to a human colleague, who will write to the customer."""
    check_text("reason", reason, 500)
    query = "SELECT id FROM customers WHERE id = ?"
    context.found(f"there is no customer {customer_id}", "find_customer shows ids", query, customer_id)
    check_allowed(context, IDENTITY, None)
    context.insert("transfers", customer_id=customer_id, reason=reason)
    return {"transferred": customer_id}


TOOLS = (talk_to_user, find_customer, get_order, start_return, transfer_to_human)
