"""Which communication backends can a world use, and how does a rank join one?"""

from fsdp_testing.base.backends.built_in import Backend, RankPlace
from fsdp_testing.base.backends.registry import backend_named, register_backend, registered_backends

__all__ = ["Backend", "RankPlace", "backend_named", "register_backend", "registered_backends"]
