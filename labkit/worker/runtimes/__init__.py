"""The kinds of rank: torch, rpc, tensorflow and bare, and the table of them."""
