"""Guessing game: find a number in as few guesses as possible."""
