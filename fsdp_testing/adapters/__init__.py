"""The sharding implementations that can be judged, and what an adapter provides. (`docs/adapters.md` is the guide.)"""
