"""A task module that ends whoever imports it."""

raise SystemExit("an accident")
