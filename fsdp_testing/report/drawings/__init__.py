"""Drawings of a run: inline SVG whose colours come from the page's style sheet, so that it prints and goes dark.

- `svg`: elements, escaped; a time axis.
- `timeline`: who computes, communicates and waits.
- `live_bytes`: what each rank holds, against what the strategy promises.
- `layout`: which rank holds which elements, padding shaded.
- `order`: two sequences side by side.
"""
