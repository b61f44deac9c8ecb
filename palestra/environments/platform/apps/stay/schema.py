"""Tables of `stay`. Money is in cents, days are ISO dates; a night belongs to the day it begins on."""

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL);
CREATE TABLE cities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, country TEXT NOT NULL);
CREATE TABLE hotels (
    id INTEGER PRIMARY KEY, city_id INTEGER NOT NULL REFERENCES cities, name TEXT NOT NULL, stars INTEGER NOT NULL,
    host_id INTEGER NOT NULL REFERENCES users
);
CREATE TABLE amenities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE hotel_amenities (
    hotel_id INTEGER NOT NULL, amenity_id INTEGER NOT NULL, PRIMARY KEY (hotel_id, amenity_id)
);
CREATE TABLE policies (
    hotel_id INTEGER PRIMARY KEY, is_refundable INTEGER NOT NULL, free_days INTEGER NOT NULL,
    fee_percent INTEGER NOT NULL
);
CREATE TABLE rooms (
    id INTEGER PRIMARY KEY, hotel_id INTEGER NOT NULL REFERENCES hotels, name TEXT NOT NULL, capacity INTEGER NOT NULL,
    count INTEGER NOT NULL
);
CREATE TABLE rates (
    room_id INTEGER NOT NULL, first_day TEXT NOT NULL, last_day TEXT NOT NULL, cents INTEGER NOT NULL,
    PRIMARY KEY (room_id, first_day)
);
CREATE TABLE sold (
    room_id INTEGER NOT NULL, day TEXT NOT NULL, rooms INTEGER NOT NULL, PRIMARY KEY (room_id, day)
);
CREATE TABLE reviews (
    id INTEGER PRIMARY KEY AUTOINCREMENT, hotel_id INTEGER NOT NULL, user_id INTEGER NOT NULL, score INTEGER NOT NULL,
    text TEXT NOT NULL, day TEXT NOT NULL
);
CREATE TABLE cards (id INTEGER PRIMARY KEY, user_id INTEGER NOT NULL, brand TEXT NOT NULL, last4 TEXT NOT NULL);
CREATE TABLE coupons (
    code TEXT PRIMARY KEY, percent INTEGER NOT NULL, min_cents INTEGER NOT NULL, expires TEXT NOT NULL
);
CREATE TABLE bookings (
    id INTEGER PRIMARY KEY AUTOINCREMENT, user_id INTEGER NOT NULL, hotel_id INTEGER NOT NULL, check_in TEXT NOT NULL,
    check_out TEXT NOT NULL, guests INTEGER NOT NULL, status TEXT NOT NULL, total_cents INTEGER NOT NULL, coupon TEXT,
    special_request TEXT NOT NULL DEFAULT '', created_at TEXT NOT NULL
);
CREATE TABLE booking_rooms (
    booking_id INTEGER NOT NULL, room_id INTEGER NOT NULL, rooms INTEGER NOT NULL, PRIMARY KEY (booking_id, room_id)
);
CREATE TABLE payments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, booking_id INTEGER NOT NULL, card_id INTEGER NOT NULL, kind TEXT NOT NULL,
    cents INTEGER NOT NULL, created_at TEXT NOT NULL
);
CREATE TABLE wishlists (
    user_id INTEGER NOT NULL, list TEXT NOT NULL, hotel_id INTEGER NOT NULL, PRIMARY KEY (user_id, list, hotel_id)
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, booking_id INTEGER NOT NULL, sender_id INTEGER NOT NULL, text TEXT NOT NULL,
    created_at TEXT NOT NULL
);
CREATE INDEX booking_rooms_room ON booking_rooms (room_id);
CREATE INDEX rooms_hotel ON rooms (hotel_id);
CREATE TABLE _quotes (
    token TEXT PRIMARY KEY, room_id INTEGER NOT NULL, check_in TEXT NOT NULL, check_out TEXT NOT NULL,
    rooms INTEGER NOT NULL, guests INTEGER NOT NULL, coupon TEXT, cents INTEGER NOT NULL, expires_at TEXT NOT NULL
);
"""
"""A quote is not a change: asking for a price leaves nothing that a task could check."""

FIXED = {
    *("users", "cities", "hotels", "amenities", "hotel_amenities", "policies", "rooms", "rates", "sold", "reviews"),
    *("cards", "coupons"),
}
VOLATILE = {"bookings": {"created_at"}, "payments": {"created_at"}, "messages": {"created_at"}}
