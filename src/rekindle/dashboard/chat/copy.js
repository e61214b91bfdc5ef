// Copying. Browsers offer the clipboard only to pages over HTTPS or on this machine; elsewhere the
// text is selected and copied the old way.

import { el } from "../dom.js";

const TOLD_MS = 1500; // how long a button says that it copied

export function copyButton(label, text) {
  const button = el("button", { type: "button", class: "quiet small copy", "data-key": label, "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    const isCopied = await copied(text());
    button.textContent = isCopied ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, TOLD_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const holder = el("textarea", { class: "visually-hidden", readonly: "" });
  holder.value = text;
  const focused = document.activeElement;
  document.body.append(holder);
  holder.select();
  const isCopied = document.execCommand("copy");
  holder.remove();
  focused?.focus();
  return isCopied;
}
