"""Files of users, for runs in a stack."""
