"""How does the state of a sharded model leave it and come back, in which form, and who says so?"""
