(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  for (const part of all("tr.check, details.suite")) part.classList.toggle("calm", !part.querySelector(".trouble"));
  const box = document.getElementById("only-trouble");
  if (box) box.closest("p").hidden = false;
  // Checks and accounts that hold every word of the filter; a suite of which nothing is left goes, too.
  const words = document.getElementById("words");
  words?.addEventListener("input", () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const holds = (text) => wanted.every((word) => text.toLowerCase().includes(word));
    for (const suite of all("details.suite")) {
      const title = suite.querySelector("summary strong").textContent;
      const rows = all("tr.check", suite);
      for (const row of rows) row.classList.toggle("filtered", !holds(`${title}.${row.textContent}`));
      const left = rows.some((row) => !row.classList.contains("filtered"));
      suite.classList.toggle("filtered", !left);
      if (wanted.length && left) suite.open = true;
    }
    for (const article of all("article")) article.classList.toggle("filtered", !holds(article.textContent));
  });
  box?.addEventListener("change", () => {
    document.body.classList.toggle("only-trouble", box.checked);
    for (const suite of all("details.suite:not(.calm)")) suite.open = suite.open || box.checked;
  });

  // What is linked or jumped to may be folded away.
  const unfold = (part) => {
    for (let box = part?.closest("details:not([open])"); box; box = box.parentElement.closest("details:not([open])")) box.open = true;
  };
  const arrive = () => {
    const part = document.getElementById(location.hash.slice(1));
    unfold(part);
    part?.scrollIntoView();
  };
  window.addEventListener("hashchange", arrive);
  if (location.hash) arrive();

  let articles = all("article");
  let current = -1;
  const go = (step) => {
    articles = all("article:not(.filtered)");
    if (!articles.length) return;
    current = (current + step + articles.length) % articles.length;
    if (current < 0) current = articles.length - 1;
    unfold(articles[current]);
    articles[current].focus({ preventScroll: true });
    articles[current].scrollIntoView({ block: "start" });
  };
  for (const [index, article] of articles.entries()) {
    article.addEventListener("focusin", () => { current = index; });
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    if (event.key === "/" && words) { event.preventDefault(); words.focus(); }
    else if (event.key === "n") go(1);
    else if (event.key === "p") go(current < 0 ? 0 : -1);
    else if (event.key === "t") { current = -1; window.scrollTo(0, 0); }
  });

  if (navigator.clipboard) {
    for (const button of all("button.copy")) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code, .numbered").textContent);
        button.textContent = "copied";
      });
    }
  }
})();
