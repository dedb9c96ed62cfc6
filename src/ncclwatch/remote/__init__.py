"""A judged job on the other side of a network: its views as bytes, and a session that follows them."""
