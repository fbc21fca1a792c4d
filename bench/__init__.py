"""Long measurements on real groups, printed as tables; no test asserts their numbers."""
