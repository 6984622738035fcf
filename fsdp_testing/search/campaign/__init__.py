"""How does a campaign of random cases go? Draw, run in batches, judge, investigate, remember."""
