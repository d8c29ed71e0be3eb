// Keeps a served report up to date: asks for its state, and when that has changed takes the new page in place of the
// old one. Boxes stay as they were ticked, what was opened stays open, and the page does not move.
"use strict";
const EVERY = 2000; // milliseconds
const sign = document.getElementById("live");
let known = null;

async function text(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.text();
}

async function look() {
  try {
    const state = await text("/state");
    if (known !== null && state !== known) exchange(await text("/"));
    known = state;
    sign.textContent = "live";
  } catch (error) {
    sign.textContent = "not connected";
  }
  setTimeout(look, EVERY);
}

function exchange(page) {
  const fresh = new DOMParser().parseFromString(page, "text/html");
  const off = [...document.querySelectorAll("main input:not(:checked)")].map(name);
  const open = [...document.querySelectorAll("main details[open] > summary")].map((one) => one.textContent);
  for (const box of fresh.querySelectorAll("main input")) box.checked = !off.includes(name(box));
  for (const one of fresh.querySelectorAll("main details > summary"))
    one.parentElement.open = open.includes(one.textContent);
  for (const part of ["style", "header", "main"])
    document.querySelector(part).replaceWith(document.adoptNode(fresh.querySelector(part)));
  document.title = fresh.title;
}

function name(box) {
  return box.closest("fieldset").querySelector("legend").textContent + " " + box.parentElement.textContent.trim();
}

look();
