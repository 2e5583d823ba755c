/**
 * A decoded photo at a model's size, to the bit as training resizes it (fedmpq.data.photo).
 *
 * <p>Half the size is the mean of 2x2 pixels, {@code (a + b + c + d + 2) >> 2}. Any other size is the mean of the
 * pixels whose centres lie in the area of the new one, along rows first and then along columns, each time with
 * weights rounded to 22 places after the binary point and the sum rounded to a byte.
 */
public final class Pixels {
  private static final int PLACES = 22;

  public final int height;
  public final int width;
  public final int channels;

  /** Rows of pixels, {@code channels} bytes each: red, green and blue, or grey. */
  public final byte[] bytes;

  public Pixels(int height, int width, int channels, byte[] bytes) {
    if (bytes.length != height * width * channels) {
      throw new IllegalArgumentException(bytes.length + " bytes are no " + height + "x" + width + "x" + channels);
    }
    this.height = height;
    this.width = width;
    this.channels = channels;
    this.bytes = bytes;
  }

  /** Packed colours, 0xAARRGGBB, as {@code BufferedImage.getRGB} and Android's {@code Bitmap.getPixels} give. */
  public static Pixels ofColours(int height, int width, int channels, int[] packed) {
    byte[] bytes = new byte[height * width * channels];
    for (int pixel = 0; pixel < packed.length; pixel++) {
      int red = packed[pixel] >> 16 & 255;
      int green = packed[pixel] >> 8 & 255;
      int blue = packed[pixel] & 255;
      if (channels == 1) {
        bytes[pixel] = (byte) (19595 * red + 38470 * green + 7471 * blue + 32768 >> 16);
      } else {
        bytes[3 * pixel] = (byte) red;
        bytes[3 * pixel + 1] = (byte) green;
        bytes[3 * pixel + 2] = (byte) blue;
      }
    }
    return new Pixels(height, width, channels, bytes);
  }

  /** The photo at the model's size. */
  public Pixels resized(int newHeight, int newWidth) {
    if (height == 2 * newHeight && width == 2 * newWidth) {
      return halved();
    }
    return withWidth(newWidth).transposed().withWidth(newHeight).transposed();
  }

  private int at(int row, int column, int channel) {
    return bytes[(row * width + column) * channels + channel] & 255;
  }

  private Pixels halved() {
    byte[] out = new byte[height / 2 * (width / 2) * channels];
    int place = 0;
    for (int row = 0; row < height; row += 2) {
      for (int column = 0; column < width; column += 2) {
        for (int channel = 0; channel < channels; channel++) {
          int above = at(row, column, channel) + at(row, column + 1, channel);
          int below = at(row + 1, column, channel) + at(row + 1, column + 1, channel);
          out[place++] = (byte) (above + below + 2 >> 2);
        }
      }
    }
    return new Pixels(height / 2, width / 2, channels, out);
  }

  private Pixels withWidth(int newWidth) {
    if (width == newWidth) {
      return this;
    }
    byte[] out = new byte[height * newWidth * channels];
    for (int column = 0; column < newWidth; column++) {
      Area area = new Area(width, newWidth, column);
      for (int row = 0; row < height; row++) {
        for (int channel = 0; channel < channels; channel++) {
          long sum = 0;
          for (int i = 0; i < area.weights.length; i++) {
            sum += (long) area.weights[i] * at(row, area.first + i, channel);
          }
          out[(row * newWidth + column) * channels + channel] = rounded(sum);
        }
      }
    }
    return new Pixels(height, newWidth, channels, out);
  }

  private Pixels transposed() {
    byte[] out = new byte[bytes.length];
    int place = 0;
    for (int column = 0; column < width; column++) {
      for (int row = 0; row < height; row++) {
        for (int channel = 0; channel < channels; channel++) {
          out[place++] = (byte) at(row, column, channel);
        }
      }
    }
    return new Pixels(width, height, channels, out);
  }

  private static byte rounded(long sum) {
    return (byte) Math.max(0, Math.min(255, sum + (1 << PLACES - 1) >> PLACES));
  }

  /** The pixels of a line that make a new one, and what each counts, in 2^-22. */
  private static final class Area {
    final int first;
    final int[] weights;

    Area(int from, int to, int place) {
      double scale = (double) from / to;
      double wide = Math.max(scale, 1.0);
      double centre = (place + 0.5) * scale;
      first = Math.max(0, (int) (centre - 0.5 * wide + 0.5));
      weights = new int[Math.min(from, (int) (centre + 0.5 * wide + 0.5)) - first];
      int count = 0;
      for (int i = 0; i < weights.length; i++) {
        double distance = (first + i - centre + 0.5) * (1.0 / wide);
        weights[i] = distance > -0.5 && distance <= 0.5 ? 1 : 0;
        count += weights[i];
      }
      for (int i = 0; i < weights.length; i++) {
        weights[i] *= (int) (0.5 + 1.0 / count * (1 << PLACES));
      }
    }
  }
}
