"""How is a case run: by an implementation on its ranks, and by the oracle in one process?"""

# Registers its handlers in the tables of engine and oracle.
from fsdp_testing.programs import handlers_state as handlers_state
