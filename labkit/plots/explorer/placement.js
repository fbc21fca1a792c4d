// Where the explorer is placed in the page: over the notebook's image, while the kernel is alive.

/** Cover each of the page's images that belongs to this widget, while the kernel is alive. */
function initialize({ model }) {
  const covers = new Map(); // by image
  const search = () => {
    const end = model.get("about").image;
    for (const image of document.querySelectorAll('img[src^="data:image/png"]')) {
      if (covers.has(image) || image.dataset.labkit || !image.src.trimEnd().endsWith(end)) continue;
      image.dataset.labkit = "covered";
      covers.set(image, new Explorer(model, image.parentElement, () => (image.style.display = "none")));
    }
  };
  let due = 0;
  const observer = new MutationObserver(() => {
    due ||= requestAnimationFrame(() => {
      due = 0;
      search();
    });
  });
  observer.observe(document.body, { childList: true, subtree: true });
  search();
  return () => {
    observer.disconnect();
    cancelAnimationFrame(due);
    for (const [image, explorer] of covers) {
      explorer.remove();
      image.style.display = "";
      delete image.dataset.labkit;
    }
  };
}

/** In front ends that provide an element for the widget. */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  return () => explorer.remove();
}

export default { initialize, render };
