"""Math with verifiable answers: generated addition, GSM8K, MATH-500."""
