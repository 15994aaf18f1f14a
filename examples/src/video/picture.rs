use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};

/// A picture in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// In pixels.
    pub width: usize,
    /// In pixels.
    pub height: usize,
    /// Row by row, red, green and blue of each pixel: `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// A picture whose pixels a function of row and column gives.
    pub fn draw([height, width]: [usize; 2], pixel: impl Fn(usize, usize) -> [u8; 3]) -> Self {
        let pixel = &pixel;
        let rgb = (0..height).flat_map(|row| (0..width).flat_map(move |column| pixel(row, column)));
        Self {
            width,
            height,
            rgb: rgb.collect(),
        }
    }

    /// `[height, width]`.
    pub fn size(&self) -> [usize; 2] {
        [self.height, self.width]
    }

    /// The pixel in a row and a column.
    ///
    /// # Panics
    /// If there is none.
    pub fn pixel(&self, row: usize, column: usize) -> [u8; 3] {
        assert!(row < self.height && column < self.width, "no pixel ({row}, {column})");
        let at = 3 * (row * self.width + column);
        [self.rgb[at], self.rgb[at + 1], self.rgb[at + 2]]
    }

    /// The picture in another size: scaled by a triangle filter until it covers that, then cropped to the centre.
    ///
    /// # Panics
    /// If there is nothing in the picture or in the size.
    pub fn fit(self, size: [usize; 2]) -> Self {
        if self.size() == size {
            return self;
        }
        let [height, width] = size.map(|pixels| pixels as u32);
        let image = DynamicImage::ImageRgb8(self.into());
        image.resize_to_fill(width, height, FilterType::Triangle).into()
    }
}

impl From<Picture> for RgbImage {
    fn from(picture: Picture) -> Self {
        let bytes = picture.rgb.len();
        RgbImage::from_raw(picture.width as u32, picture.height as u32, picture.rgb)
            .unwrap_or_else(|| panic!("{bytes} bytes for {}x{}", picture.width, picture.height))
    }
}

impl From<DynamicImage> for Picture {
    /// Transparency is dropped, and of deeper samples the upper 8 bits are kept.
    fn from(image: DynamicImage) -> Self {
        let image = image.into_rgb8();
        Self {
            width: image.width() as usize,
            height: image.height() as usize,
            rgb: image.into_raw(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_picture_loses_its_sides_and_a_tall_one_top_and_bottom() {
        // Three bands: only the middle one is left of a picture three times as long as the size.
        let bands = [[9, 0, 0], [0, 9, 0], [0, 0, 9]];
        let middle = Picture::draw([4, 4], |_, _| bands[1]);
        let wide = Picture::draw([4, 12], |_, column| bands[column / 4]);
        let tall = Picture::draw([12, 4], |row, _| bands[row / 4]);
        assert_eq!(wide.fit([4, 4]), middle);
        assert_eq!(tall.fit([4, 4]), middle);
    }

    #[test]
    fn scaling_keeps_a_flat_colour_and_the_same_size_everything() {
        let flat = Picture::draw([5, 7], |_, _| [200, 100, 3]);
        for size in [[10, 14], [2, 3], [7, 5], [1, 1]] {
            assert_eq!(
                flat.clone().fit(size),
                Picture::draw(size, |_, _| [200, 100, 3]),
                "{size:?}"
            );
        }
        let any = Picture::draw([3, 4], |row, column| [row as u8, column as u8, 77]);
        assert_eq!(any.clone().fit([3, 4]), any);
    }

    #[test]
    fn half_the_size_is_the_mean_by_a_triangle() {
        // Twice the support when shrinking by two: weights 1, 3, 3, 1 of four columns; fewer at the borders.
        let steps = Picture::draw([2, 8], |_, column| [if column < 4 { 0 } else { 210 }; 3]);
        let shrunk = steps.fit([1, 4]);
        let red: Vec<u8> = (0..4).map(|column| shrunk.pixel(0, column)[0]).collect();
        assert_eq!(red, [0, 26, 184, 210]);
    }
}
