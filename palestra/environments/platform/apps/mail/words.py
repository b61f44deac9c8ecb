"""Texts of mails and events of a world: subjects, bodies, titles."""

from __future__ import annotations

PROJECTS = ("Harbor", "Juniper", "Lantern", "Meridian", "Orchard", "Pebble", "Saffron", "Tundra")

WORK = (
    ("{project} budget", "I went through the numbers for {project} again. We are a little over in travel."),
    ("{project}: notes from the review", "Here are my notes. The main point: we need one more week for testing."),
    ("Question on the {project} schedule", "Can you tell me which of the two dates is still open?"),
    ("Draft of the {project} report", "Please have a look at the second section before I send it on."),
    ("{project} launch", "The launch moves by a few days. Nothing else changes."),
    ("Access to the {project} folder", "I cannot open the shared folder any more. Who looks after it now?"),
    ("Feedback on {project}", "The client liked the first version and asked for larger type."),
    ("Travel for {project}", "I will take the early train. Shall we share a taxi from the station?"),
    ("{project} hiring", "Two people applied. I would like to talk to both next week."),
    ("{project}: open questions", "There are three points left. None of them is urgent."),
)
SIGN_OFFS = ("Best", "Thanks", "Kind regards", "See you", "Cheers")

NEWSLETTERS = (
    ("The Weekly Loaf", "loaf@bakers-post.example", ("Rye at home", "Five quick crusts", "A word on salt")),
    ("Trail Letter", "hello@trail-letter.example", ("Huts of the north", "Boots that last", "Maps for autumn")),
    ("Code Digest", "digest@code-digest.example", ("Small functions", "Tests that help", "Reading old code")),
    ("Garden Hours", "post@garden-hours.example", ("Beans and peas", "Water in summer", "Roses in pots")),
)
NEWSLETTER_BODY = "In this issue: {headline}. You get this because you signed up. Unsubscribe at any time."

INVOICE_SUBJECT = "Invoice {number} from {company}"
INVOICE_BODY = "Please find our invoice {number} attached.\nAmount due: ${amount}\nPayable within 30 days."

FACTS = (
    ("door code", "Getting into the {place}", "The door code is {code}."),
    ("tracking number", "Your parcel for the {place}", "The tracking number is {code}."),
    ("booking reference", "Your stay near the {place}", "The booking reference is {code}."),
    ("order number", "New chairs for the {place}", "The order number is {code}."),
)
PLACES = ("annex", "archive room", "boathouse", "guest house", "library", "mill", "old depot", "print shop", "workshop")

FOLDERS = ("Clients", "Personal", "Projects", "Receipts", "Travel")
LABELS = ("Follow up", "Important", "Later", "Team", "Urgent")
ROOMS = ("Room Alder", "Room Birch", "Room Elm", "Room Maple", "Room Willow")
MEETINGS = (
    "{project} sync",
    "{project} planning",
    "{project} demo",
    "{project} retro",
    "{project} check-in",
    "Talk on {project}",
)

REPLIES = (
    "Thanks, that works for me.",
    "I will look at it tomorrow.",
    "Please go ahead without me.",
    "Could you send me the newest version?",
    "Yes, Tuesday is fine.",
    "I would rather wait until next week.",
    "Great news, well done.",
    "Let us talk about it on the phone.",
    "I have no objections.",
    "Sorry for the late answer, I agree.",
)
COMMENTS = (
    "Please pay this one.",
    "Can you check this?",
    "For your records.",
    "This is the big one.",
    "Please book it to this month.",
    "Is this amount right?",
)
NOTICE_SUBJECTS = ("New time", "Meeting moved", "Change of plan", "Rescheduled", "Other time", "Moved")
NOTICES = (
    "Our meeting has moved, please check your calendar.",
    "I had to move our meeting. Sorry for the trouble.",
    "We meet at another time that day.",
    "There was a clash, so I found us a new time.",
    "Please note the new time in the calendar.",
    "The old time did not work for me, so I moved us.",
)
