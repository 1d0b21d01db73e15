// The token that every request needs. It is in the address's fragment, which browsers send to
// nobody, for as long as it takes to read it; then it is in this tab's memory only.

const KEY = "headway-token";

export function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    keepToken(given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token);
}
