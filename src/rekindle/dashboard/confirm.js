// The dialog before something is deleted.

import { byId } from "./dom.js";

export function confirmed(title, text) {
  const dialog = byId("confirm-dialog");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  dialog.showModal();
  return new Promise((done) => {
    const answer = (value) => () => {
      dialog.onclose = null;
      dialog.close();
      done(value);
    };
    byId("confirm-yes").onclick = answer(true);
    byId("confirm-no").onclick = answer(false);
    dialog.onclose = () => done(false);
  });
}
