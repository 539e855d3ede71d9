"""The machine's users: their caps, their card-hours, and bookings of cards."""
