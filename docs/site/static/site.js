// The theme leaves out what the keyboard and a screen reader need.
for (const wide of document.querySelectorAll("pre, .table-wrapper")) {
  wide.tabIndex = 0; // it scrolls sideways, and only what has the focus scrolls by keys
}
for (const caption of document.querySelectorAll('[role="heading"]:not([aria-level])')) {
  caption.setAttribute("aria-level", "2");
}
