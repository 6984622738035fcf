"""How is a case run: by an implementation on its ranks, and by the oracle in one process?"""
