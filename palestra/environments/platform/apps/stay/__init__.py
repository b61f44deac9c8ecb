"""`stay`: hotels, rooms, prices that move, policies that cost."""

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.apps.stay import booking_tools as b
from palestra.environments.platform.apps.stay import search_tools as s
from palestra.environments.platform.apps.stay.schema import FIXED, SCHEMA, VOLATILE
from palestra.environments.platform.apps.stay.seed import fill, fill_with
from palestra.environments.platform.apps.stay.tasks_choice import CHOICES
from palestra.environments.platform.apps.stay.tasks_plain import PLAIN

STAY = TaskApp(
    key="stay",
    title="Stay",
    description="Hotel booking: search, quotes, bookings, cancellation.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    fill_with=fill_with,
    tools=(
        s.search_hotels,
        s.get_hotel,
        s.list_rooms,
        s.get_reviews,
        b.quote_booking,
        b.confirm_booking,
        s.list_bookings,
        s.get_booking,
        b.change_booking,
        b.cancel_booking,
        s.list_cards,
        b.save_to_wishlist,
        b.message_host,
    ),
    templates=(*PLAIN, *CHOICES),
    fixed=FIXED,
    volatile=VOLATILE,
)

__all__ = ["STAY"]
