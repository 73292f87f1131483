// Which theme the reader chose, put on the page before it is painted.
"use strict";
try {
  const chosen = localStorage.getItem("trimtab-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing shows the system's theme.
}
