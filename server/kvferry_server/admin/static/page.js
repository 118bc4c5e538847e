"use strict";
// Loads the page again every two seconds, as long as somebody looks at it, and exchanges what is in <main>.
setInterval(async () => {
  if (!document.querySelector("#live").checked || document.hidden) {
    return;
  }
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) {
      return;
    }
    const loaded = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(document.adoptNode(loaded.querySelector("main")));
    document.querySelector("#updated").textContent = new Date().toLocaleTimeString();
  } catch {
    // The node server is away; the next try may find it.
  }
}, 2000);
