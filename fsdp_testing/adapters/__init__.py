"""Which sharding implementations can be judged, and what must an adapter provide? (`docs/adapters.md` is the guide.)"""
