"""Does every implementation's saved state load into every other, at every layout, equal to the bit?"""
