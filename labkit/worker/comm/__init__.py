"""Records every collective, message and RPC of a rank as a span, and delays them on an emulated link."""
