// Where a picture stands in the notebook: over the image that the notebook keeps, as long as the kernel lives.

/** Over each image of the page that is this widget's own, for as long as the kernel lives. */
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
  const watch = new MutationObserver(() => {
    due ||= requestAnimationFrame(() => {
      due = 0;
      search();
    });
  });
  watch.observe(document.body, { childList: true, subtree: true });
  search();
  return () => {
    watch.disconnect();
    cancelAnimationFrame(due);
    for (const [image, explorer] of covers) {
      explorer.remove();
      image.style.display = "";
      delete image.dataset.labkit;
    }
  };
}

/** Where the front end gives the widget a place of its own. */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  return () => explorer.remove();
}

export default { initialize, render };
