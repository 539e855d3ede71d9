"""The rules for users of one machine: caps, card-hours, bookings."""
