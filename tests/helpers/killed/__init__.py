"""A training that is killed, over and over, and who watches what it leaves behind."""
