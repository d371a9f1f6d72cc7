// SPDX-License-Identifier: Apache-2.0
// Calls of the server that the page came from. The key is kept here alone: in no address, no storage and no log.

import { make } from "./dom.js";

const TITLES = {
  unauthorized: "The API key is missing or wrong",
  forbidden: "This key may not do that",
  not_found: "Not found",
  invalid_json: "The request is no JSON",
  invalid_request: "The request cannot be answered as it is",
  body_too_large: "The request is too large",
  quota_exceeded: "The key's quota is used up",
  overloaded: "The server has no time for it",
  deadline_exceeded: "It came too late",
  unavailable: "The server does not serve now",
  internal: "The server failed",
};

const LATE = "The server does not answer in time.";
const ASKS_A_KEY = "The server asks for an API key that it knows: see the top of the page.";

/** A refusal, or a server out of reach. type: the error's stable name, "" where there was no answer. */
export class ApiError extends Error {
  constructor(message, { type = "", status = 0, field, predicted_ms, request_id, wait } = {}) {
    super(message);
    Object.assign(this, { type, status, field, predicted_ms, request_id, wait });
  }

  /** The error in words. */
  show() {
    const facts = [
      this.field && `Field: ${this.field}`,
      this.predicted_ms && `It would have taken ${this.predicted_ms} ms`,
      this.wait && `Try again in ${this.wait} s`,
      this.status && `HTTP ${this.status} ${this.type}`,
      this.request_id && `Request ${this.request_id}`,
    ].filter(Boolean);
    const title = TITLES[this.type] ?? (this.status ? "The server refused" : "No answer");
    return make(
      "div",
      { class: "error", role: "alert" },
      make("strong", {}, title),
      make("p", {}, this.message),
      facts.length ? make("p", { class: "facts" }, facts.join(" · ")) : null,
    );
  }
}

/** Any error in words. What is wrong with the key is told in full beside the key alone; see Api.refused. */
export function inWords(error) {
  if (error.type === "unauthorized") return make("p", { class: "hint" }, ASKS_A_KEY);
  if (error instanceof ApiError) return error.show();
  return make("div", { class: "error", role: "alert" }, make("p", {}, error.message));
}

export class Api {
  #key = "";
  #refused;

  /** refused: called with the error whenever the key that is set is missing or wrong. */
  constructor(refused) {
    this.#refused = refused;
  }

  setKey(key) {
    this.#key = key.trim();
  }

  /** The JSON at a path, which has no slash in front. query: a list is several values. Throws ApiError, as the others
   * do. */
  async get(path, query = {}) {
    return readJson(await this.#call(path, { query }));
  }

  /** The text at a path, if all of it is there within so many milliseconds. */
  async text(path, timeoutMs) {
    return read(await this.#call(path, { signal: AbortSignal.timeout(timeoutMs) }));
  }

  async post(path, body, signal) {
    return readJson(await this.#call(path, { method: "POST", body: JSON.stringify(body), signal }));
  }

  async #call(path, { method = "GET", query = {}, body, signal }) {
    const url = new URL(path, document.baseURI); // below whatever base path the page has
    for (const [name, values] of Object.entries(query)) {
      for (const value of [values].flat()) if (value !== "") url.searchParams.append(name, value);
    }
    const headers = body ? { "Content-Type": "application/json" } : {};
    const key = this.#key;
    if (key) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(url, { method, headers, body, signal, cache: "no-store" });
    } catch (error) {
      throw new ApiError(error.name === "TimeoutError" ? LATE : "The server cannot be reached.");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.type === "unauthorized" && key === this.#key) this.#refused(error);
    throw error;
  }
}

async function read(response) {
  try {
    return await response.text();
  } catch (error) {
    throw new ApiError(error.name === "TimeoutError" ? LATE : "The answer was cut off.");
  }
}

async function readJson(response) {
  const text = await read(response);
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("What came is not the answer of a jgr server.");
  }
}

async function refusal(response) {
  const said = { status: response.status, wait: response.headers.get("Retry-After") };
  try {
    const { message, ...more } = (await response.json()).error;
    return new ApiError(String(message), { ...said, ...more });
  } catch {
    return new ApiError(`HTTP ${response.status}, without a word that can be read.`, said);
  }
}
