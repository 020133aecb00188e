"""No-limit Texas hold'em: the table, its text, rule-based opponents, histories and evaluation."""
