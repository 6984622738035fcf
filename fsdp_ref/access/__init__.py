"""How do users get at full parameters: summoned, as a state dict, edited, gathered early?"""
